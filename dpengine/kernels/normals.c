/* Gaussian noise from a ChaCha20 key, added to a vector. Its plain twin, dpengine/noise/box_muller.py, says what is
   computed, and gives the same bits: only operations that IEEE 754 rounds exactly are used, and none may be fused.

   The body is compiled once for each family of processors, and the best one that the machine has is taken. */

#include <stdint.h>
#include <string.h>

#define INLINE(target) static inline __attribute__((always_inline)) target

#if defined(__x86_64__)

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#define NAMED(name) name##_avx512
#include "normals_body.h"
#undef LANES
#undef TARGET
#undef NAMED

#define LANES 8
#define TARGET __attribute__((target("avx2")))
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

/* 2 allows AVX-512, 1 AVX2, 0 neither: the results are the same. For tests. */
static int allowed = 2;
void allow_vectors(int most) { allowed = most; }

#if defined(__x86_64__)
static int level(void) {
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    int best = wide ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
    return best < allowed ? best : allowed;
}
#define BEST(name) level() == 2 ? name##_avx512 : level() == 1 ? name##_avx2 : name##_any
#else
#define BEST(name) name##_any
#endif

/* to[k] = (to[k] + std * z[first + k]) * scale for k < count, where z are the normals that belong to the key. */
#define DEFINE(name, number)                                                                                           \
    void name(const uint32_t *key, uint64_t first, uint64_t count, double std, double scale, number *to) {             \
        (BEST(name))(key, first, count, std, scale, to);                                                               \
    }

DEFINE(add_normals_f32, float)
DEFINE(add_normals_f64, double)
