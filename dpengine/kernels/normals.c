/* Adds Gaussian noise from a ChaCha20 key to a vector. dpengine/noise/box_muller.py defines the noise and computes the
   same bits, because both use only operations that IEEE 754 rounds exactly. Operations must not be fused. */

#include <stdint.h>
#include <string.h>

#include "team.h"
#include "vectors.h"

#if defined(__x86_64__)

#define LANES 16
#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "normals_body.h"
#undef LANES
#undef TARGET
#undef NAMED

#define LANES 8
#define TARGET AVX2
#define NAMED(name) name##_avx2
#include "normals_body.h"
#undef LANES
#undef TARGET
#undef NAMED

#endif

#define LANES 4
#define TARGET
#define NAMED(name) name##_any
#include "normals_body.h"

enum { CHUNK = 32 * GROUP }; /* normals that a thread generates at a time */

/* Computes to[r * length + k] = (to[r * length + k] + std * z[first + r * stride + k]) * scale for r < rows and
   k < length, where z are the normals of the key. If there is a team, `threads` threads process chunks: of complete
   groups for a single row, else of complete rows. */
#define DEFINE(name, number)                                                                                           \
    struct name##_job {                                                                                                \
        const uint32_t *key;                                                                                           \
        uint64_t first, rows, length, stride, next;                                                                    \
        double std, scale;                                                                                             \
        number *to;                                                                                                    \
    };                                                                                                                 \
    static void name##_chunks(void *data) {                                                                            \
        struct name##_job *job = data;                                                                                 \
        uint64_t start, lead = job->first % CHUNK;                                                                     \
        while ((start = __atomic_fetch_add(&job->next, CHUNK, __ATOMIC_RELAXED)) < job->length + lead) {               \
            uint64_t low = start < lead ? 0 : start - lead, high = start + CHUNK - lead;                               \
            high = high < job->length ? high : job->length;                                                            \
            (BEST(name))(job->key, job->first + low, 1, high - low, 0, job->std, job->scale, job->to + low);           \
        }                                                                                                              \
    }                                                                                                                  \
    static void name##_row_chunks(void *data) {                                                                        \
        struct name##_job *job = data;                                                                                 \
        uint64_t start, each = job->length < CHUNK ? CHUNK / job->length : 1;                                          \
        while ((start = __atomic_fetch_add(&job->next, each, __ATOMIC_RELAXED)) < job->rows) {                         \
            uint64_t rows = start + each < job->rows ? each : job->rows - start;                                       \
            (BEST(name))(job->key, job->first + start * job->stride, rows, job->length, job->stride, job->std,         \
                         job->scale, job->to + start * job->length);                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    void name(const uint32_t *key, uint64_t first, uint64_t rows, uint64_t length, uint64_t stride, double std,        \
              double scale, number *to, unsigned threads, team run) {                                                  \
        struct name##_job job = {key, first, rows, length, stride, 0, std, scale, to};                                 \
        if (length) run_in_team(rows == 1 ? name##_chunks : name##_row_chunks, &job, threads, run);                    \
    }

DEFINE(add_normals_f32, float)
DEFINE(add_normals_f64, double)
