/* Computes per-sample weight gradients, which are sums over positions of outer products, and their norms.

   dpengine/grad_samplers computes the same with torch. Rows (samples) are independent, so a value that is not finite
   affects only its own row. Products and sums may be fused. */

#include <stdint.h>
#include <string.h>

#include "team.h"
#include "vectors.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#endif

/* One factor of the outer products: `width` features at each position of each row, with strides. */
struct factor {
    const float *at;
    uint64_t row_stride, position_stride, feature_stride, width;
};

struct grams {
    uint64_t rows, positions, factors, products;
    const struct factor *factor;
    const uint64_t *product; /* for each product, the number of its factors and their indices */
    double *sq_norm, *rounding_scale, *work;
    uint64_t work_per_thread, next, next_thread;
};

/* A sum over positions of products of `narrow` with values derived from `wide`, which depend on `kind`.

   WINDOWS: sliding windows of a tensor (rows, groups, channels, size...). Without channels, the values are 1.
   CENTERED, SCALED: numbers (rows, groups, size[2]), normalized in each group, in which kernel[2] adjacent numbers
   belong to one feature. A group has `channels` separate features; if it is 0, all groups share the same features.
   ENTRIES: one-hot vectors of length size[2] for each index (rows, positions[2]); index kernel[2] is ignored. */
enum kind { WINDOWS, CENTERED, SCALED, ENTRIES };
struct outers {
    uint64_t rows, groups, channels, size[3], kernel[3], stride[3], dilation[3], positions[3];
    const float *wide;
    const float *narrow; /* (rows, groups, height, positions), with strides */
    uint64_t height, row_stride, group_stride, channel_stride, position_stride;
    float *out; /* (rows, groups, height, features), or null */
    uint64_t out_row_stride;
    double *sq_norm; /* (rows) */
    uint64_t kind;
    double eps; /* added to the mean of the squares */
};

struct outer_jobs {
    const struct outers *job;
    uint64_t count, rows;
    char *work;
    uint64_t work_per_thread, next, next_thread;
};

enum { SPAN = 256 };              /* features of a factor that are converted to float64 at a time, to fit the cache */
enum { ROWS = 8 };                /* rows that a thread processes at a time */
enum { COPIED_FLOATS = 1 << 15 }; /* numbers of windows that are copied at a time */

/* TILE_SIDE: side of a tile of a Gram matrix. TILE_HEIGHT: rows of a tile of a product. Tiles fit the registers. */
#if defined(__x86_64__)

#define LANES 16
#define TILE_SIDE 5
#define TILE_HEIGHT 8
#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "products_body.h"

#define LANES 8
#define TILE_SIDE 3
#define TILE_HEIGHT 4
#define TARGET AVX2_FMA
#define NAMED(name) name##_avx2
#include "products_body.h"

#endif

#define LANES 4
#define TILE_SIDE 3
#define TILE_HEIGHT 4
#define TARGET
#define NAMED(name) name##_any
#include "products_body.h"

static void *work_of_thread(void *work, uint64_t each, uint64_t *next_thread) {
    return (char *)work + each * __atomic_fetch_add(next_thread, 1, __ATOMIC_RELAXED);
}

struct row_norms {
    const float *at;
    uint64_t count, size, stride, next;
    double *sq_norm;
};

static void square_chunks(void *data) {
    struct row_norms *job = data;
    for (uint64_t row, end; (row = __atomic_fetch_add(&job->next, ROWS, __ATOMIC_RELAXED)) < job->count;)
        for (end = row + ROWS < job->count ? row + ROWS : job->count; row < end; row++)
            (BEST(squares))(job->at + row * job->stride, job->size, job->sq_norm + row);
}

/* Computes the sum of the squares of each row, in float64. */
void sq_norms_f32(uint64_t count, uint64_t size, uint64_t stride, const float *at, double *sq_norm, unsigned threads,
                  team run) {
    struct row_norms job = {at, count, size, stride, 0, sq_norm};
    run_in_team(square_chunks, &job, count * size < 1 << 16 ? 1 : threads, run);
}

static void gram_chunks(void *data) {
    struct grams *job = data;
    double *work = work_of_thread(job->work, job->work_per_thread, &job->next_thread);
    for (uint64_t row; (row = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->rows;)
        (BEST(gram_row))(job, row, work);
}

/* Returns the size in bytes of the work memory of a thread for gram_norms_f32. */
uint64_t gram_work(uint64_t positions, uint64_t factors) { return 8 * (BEST(gram_doubles))(positions, factors); }

/* Computes the squared norm of a sum over positions of outer products, in float64, and the sum of the norms of its
   terms, for each product of factors and each row. `work` and the results of gram_work are aligned to 64 bytes. */
void gram_norms_f32(uint64_t rows, uint64_t positions, uint64_t factors, const struct factor *factor, uint64_t products,
                    const uint64_t *product, double *sq_norm, double *rounding_scale, void *work, unsigned threads,
                    team run) {
    struct grams job = {rows, positions, factors, products, factor, product, sq_norm, rounding_scale, work,
                        gram_work(positions, factors), 0, 0};
    run_in_team(gram_chunks, &job, threads, run);
}

static void outer_chunks(void *data) {
    struct outer_jobs *all = data;
    float *work = work_of_thread(all->work, all->work_per_thread, &all->next_thread);
    for (uint64_t i; (i = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->count * all->rows;)
        (BEST(outer_row))(all->job + i / all->rows, i % all->rows, work);
}

/* Returns the size in bytes of the work memory of a thread for sum_products_f32. */
uint64_t products_work(uint64_t count, const struct outers *job) {
    uint64_t max_bytes = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes = 4 * (BEST(outer_floats))(job + i);
        max_bytes = bytes > max_bytes ? bytes : max_bytes;
    }
    return max_bytes;
}

/* Computes the sum over positions of narrow (outer) window for each row and group, and the squared norm of each row, of
   several jobs with the same number of rows. */
void sum_products_f32(uint64_t count, const struct outers *job, void *work, unsigned threads, team run) {
    struct outer_jobs all = {job, count, count ? job->rows : 0, work, products_work(count, job), 0, 0};
    run_in_team(outer_chunks, &all, threads, run);
}
