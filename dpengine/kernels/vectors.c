#include "vectors.h"

/* Limits the vector instructions, for tests: 2 allows AVX-512, 1 allows AVX2, 0 allows neither. */
static int allowed = 2;
void allow_vectors(int most) { allowed = most; }

/* Must be increased when the arguments of a function change. library.py rejects other versions. */
int interface_version(void) { return 4; }

int vector_level(void) {
#if defined(__x86_64__)
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    int best = wide ? 2 : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
    return best < allowed ? best : allowed;
#else
    return 0;
#endif
}
