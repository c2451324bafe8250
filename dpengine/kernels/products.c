/* Computes per-sample weight gradients, which are sums over positions of outer products, and their norms.

   dpengine/grad_samplers computes the same with torch. Rows are independent, so a value that is not finite affects only
   its own row. Products and sums may be fused. */

#include <stdint.h>
#include <string.h>

#include "team.h"
#include "vectors.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#endif

/* One factor of the outer products: `width` features at each position (place) of each row, with strides. */
struct factor {
    const float *at;
    uint64_t row, place, feature, width;
};

struct grams {
    uint64_t rows, places, factors, products;
    const struct factor *factor;
    const uint64_t *product; /* for each product, the number of its factors and their indices */
    double *sq_norm, *spread, *work;
    uint64_t work_each, next, worker;
};

/* A sum over positions (places) of products of `narrow` with values derived from `wide`, which depend on `kind`.

   WINDOWS: sliding windows of a tensor (rows, groups, channels, size...). Without channels, the values are 1.
   CENTERED, SCALED: numbers (rows, groups, size[2]), normalized in each group, with runs of kernel[2] for one feature. A
   group has `channels` separate features; if `channels` is 0, all groups share the same features.
   ENTRIES: one-hot vectors of length size[2] for each index (rows, places[2]); index kernel[2] is ignored. */
enum kind { WINDOWS, CENTERED, SCALED, ENTRIES };
struct outers {
    uint64_t rows, groups, channels, size[3], kernel[3], stride[3], dilation[3], places[3];
    const float *wide;
    const float *narrow; /* (rows, groups, high, places), with strides */
    uint64_t high, row, group, channel, place;
    float *out; /* (rows, groups, high, features), or null; out_row is the stride of its rows */
    uint64_t out_row;
    double *sq_norm; /* (rows) */
    uint64_t kind;
    double eps; /* added to the mean of the squares */
};

struct all_outers {
    const struct outers *job;
    uint64_t count, rows;
    char *work;
    uint64_t work_each, next, worker;
};

enum { SPAN = 256 };         /* features of a factor that are converted to float64 at a time, to stay in the cache */
enum { ROWS = 8 };           /* rows that a thread takes at a time */
enum { LAID_OUT = 1 << 15 }; /* numbers of windows that are copied at a time */

/* SIDE: side of a tile of a Gram matrix. HIGH: rows of a product. Both fit in the registers. */
#if defined(__x86_64__)

#define LANES 16
#define SIDE 5
#define HIGH 8
#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "products_body.h"

#define LANES 8
#define SIDE 3
#define HIGH 4
#define TARGET AVX2_FMA
#define NAMED(name) name##_avx2
#include "products_body.h"

#endif

#define LANES 4
#define SIDE 3
#define HIGH 4
#define TARGET
#define NAMED(name) name##_any
#include "products_body.h"

static void *of_worker(void *work, uint64_t each, uint64_t *worker) {
    return (char *)work + each * __atomic_fetch_add(worker, 1, __ATOMIC_RELAXED);
}

struct rows {
    const float *at;
    uint64_t count, size, stride, next;
    double *sq_norm;
};

static void square_share(void *data) {
    struct rows *job = data;
    for (uint64_t row, end; (row = __atomic_fetch_add(&job->next, ROWS, __ATOMIC_RELAXED)) < job->count;)
        for (end = row + ROWS < job->count ? row + ROWS : job->count; row < end; row++)
            (BEST(squares))(job->at + row * job->stride, job->size, job->sq_norm + row);
}

/* The sum of the squares of each row, in float64. */
void sq_norms_f32(uint64_t count, uint64_t size, uint64_t stride, const float *at, double *sq_norm, unsigned threads,
                  team run) {
    struct rows job = {at, count, size, stride, 0, sq_norm};
    share_out(square_share, &job, count * size < 1 << 16 ? 1 : threads, run);
}

static void gram_share(void *data) {
    struct grams *job = data;
    double *work = of_worker(job->work, job->work_each, &job->worker);
    for (uint64_t row; (row = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->rows;)
        (BEST(gram_row))(job, row, work);
}

/* Bytes that each thread needs for gram_norms_f32. */
uint64_t gram_work(uint64_t places, uint64_t factors) { return 8 * (BEST(gram_doubles))(places, factors); }

/* For each product of factors and each row: the squared norm of the sum over positions of outer products, in float64, and
   the sum of the norms of the parts. `work` and the results of gram_work are aligned to 64 bytes. */
void gram_norms_f32(uint64_t rows, uint64_t places, uint64_t factors, const struct factor *factor, uint64_t products,
                    const uint64_t *product, double *sq_norm, double *spread, void *work, unsigned threads, team run) {
    struct grams job = {rows, places, factors, products, factor, product, sq_norm, spread, work,
                        gram_work(places, factors), 0, 0};
    share_out(gram_share, &job, threads, run);
}

static void outer_share(void *data) {
    struct all_outers *all = data;
    float *work = of_worker(all->work, all->work_each, &all->worker);
    for (uint64_t i; (i = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->count * all->rows;)
        (BEST(outer_row))(all->job + i / all->rows, i % all->rows, work);
}

/* Bytes that each thread needs for sum_products_f32. */
uint64_t products_work(uint64_t count, const struct outers *job) {
    uint64_t most = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes = 4 * (BEST(outer_floats))(job + i);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* For several jobs with the same number of rows: for each row and group the sum over positions of narrow (outer) window,
   and the squared norm of each row. */
void sum_products_f32(uint64_t count, const struct outers *job, void *work, unsigned threads, team run) {
    struct all_outers all = {job, count, count ? job->rows : 0, work, products_work(count, job), 0, 0};
    share_out(outer_share, &all, threads, run);
}
