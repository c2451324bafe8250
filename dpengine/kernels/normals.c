/* Gaussian noise from a ChaCha20 key, added to a vector. Its plain twin, dpengine/noise/box_muller.py, says what is
   computed, and gives the same bits: only operations that IEEE 754 rounds exactly are used, and none may be fused. */

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

enum { SHARE = 32 * GROUP }; /* normals that a thread draws at a time */

/* to[k] = (to[k] + std * z[first + k]) * scale for k < count, where z are the normals that belong to the key.
   Shared out to `threads` threads if there is a team. */
#define DEFINE(name, number)                                                                                           \
    struct name##_job {                                                                                                \
        const uint32_t *key;                                                                                           \
        uint64_t first, count, next;                                                                                   \
        double std, scale;                                                                                             \
        number *to;                                                                                                    \
    };                                                                                                                 \
    static void name##_share(void *data) {                                                                             \
        struct name##_job *job = data;                                                                                 \
        uint64_t start, lead = job->first % SHARE;                                                                     \
        while ((start = __atomic_fetch_add(&job->next, SHARE, __ATOMIC_RELAXED)) < job->count + lead) {                \
            uint64_t low = start < lead ? 0 : start - lead, high = start + SHARE - lead;                               \
            high = high < job->count ? high : job->count;                                                              \
            (BEST(name))(job->key, job->first + low, high - low, job->std, job->scale, job->to + low);                 \
        }                                                                                                              \
    }                                                                                                                  \
    void name(const uint32_t *key, uint64_t first, uint64_t count, double std, double scale, number *to,               \
              unsigned threads, team run) {                                                                            \
        struct name##_job job = {key, first, count, 0, std, scale, to};                                                \
        share_out(name##_share, &job, threads, run);                                                                   \
    }

DEFINE(add_normals_f32, float)
DEFINE(add_normals_f64, double)
