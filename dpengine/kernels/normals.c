/* Gaussian noise from a ChaCha20 key, added to a vector. Its plain twin, dpengine/noise/box_muller.py, says what is
   computed, and gives the same bits: only operations that IEEE 754 rounds exactly are used, and none may be fused. */

#include <stdint.h>
#include <string.h>

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

/* to[k] = (to[k] + std * z[first + k]) * scale for k < count, where z are the normals that belong to the key. */
#define DEFINE(name, number)                                                                                           \
    void name(const uint32_t *key, uint64_t first, uint64_t count, double std, double scale, number *to) {             \
        (BEST(name))(key, first, count, std, scale, to);                                                               \
    }

DEFINE(add_normals_f32, float)
DEFINE(add_normals_f64, double)
