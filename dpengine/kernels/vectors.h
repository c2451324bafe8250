/* Selects the vector instructions. Each body is compiled several times, as name_avx512, name_avx2 and name_any. */

#define INLINE(target) static inline __attribute__((always_inline)) target

#define AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#define AVX2 __attribute__((target("avx2")))
#define AVX2_FMA __attribute__((target("avx2,fma")))

/* 2 for AVX-512, 1 for AVX2, 0 for neither. */
int vector_level(void);

#if defined(__x86_64__)
#define BEST(name) vector_level() == 2 ? name##_avx512 : vector_level() == 1 ? name##_avx2 : name##_any
#else
#define BEST(name) name##_any
#endif
