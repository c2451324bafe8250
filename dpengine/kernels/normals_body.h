/* Code for one set of vector instructions, with LANES 32-bit words per vector. normals.c includes it several times. */

#define REALS (LANES / 2)
#define words NAMED(words)
#define reals NAMED(reals)
#define bits NAMED(bits)
#define halves NAMED(halves)

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef double reals __attribute__((vector_size(8 * REALS)));
typedef uint64_t bits __attribute__((vector_size(8 * REALS)));
typedef uint32_t halves __attribute__((vector_size(4 * REALS)));

#ifndef GROUP
enum { COLUMNS = 16, PARTS = 3, BLOCKS = PARTS * COLUMNS, PAIRS = 256, GROUP = 2 * PAIRS };
#define GROUP GROUP
#define QUARTER(a, b, c, d)                                                                                            \
    a += b; d ^= a; d = (d << 16) | (d >> 16);                                                                         \
    c += d; b ^= c; b = (b << 12) | (b >> 20);                                                                         \
    a += b; d ^= a; d = (d << 8) | (d >> 24);                                                                          \
    c += d; b ^= c; b = (b << 7) | (b >> 25);
#endif

/* Generates LANES blocks of keystream, from block `first` on. Word w of block l is written to out[COLUMNS * w + l]. */
INLINE(TARGET) void NAMED(blocks)(const uint32_t *key, uint64_t first, uint32_t *out) {
    words x[16], start[16];
    for (int w = 0; w < 16; w++) start[w] = (words){0};
    for (int w = 0; w < 8; w++) start[4 + w] += key[w];
    start[0] += 0x61707865u, start[1] += 0x3320646eu, start[2] += 0x79622d32u, start[3] += 0x6b206574u;
    for (int l = 0; l < LANES; l++) start[12][l] = (uint32_t)(first + l), start[13][l] = (uint32_t)((first + l) >> 32);
    memcpy(x, start, sizeof x);
    for (int i = 0; i < 10; i++) {
        QUARTER(x[0], x[4], x[8], x[12]) QUARTER(x[1], x[5], x[9], x[13])
        QUARTER(x[2], x[6], x[10], x[14]) QUARTER(x[3], x[7], x[11], x[15])
        QUARTER(x[0], x[5], x[10], x[15]) QUARTER(x[1], x[6], x[11], x[12])
        QUARTER(x[2], x[7], x[8], x[13]) QUARTER(x[3], x[4], x[9], x[14])
    }
    for (int w = 0; w < 16; w++) {
        x[w] += start[w];
        memcpy(out + COLUMNS * w, &x[w], sizeof x[w]);
    }
}

INLINE(TARGET) reals NAMED(as_reals)(bits x) {
    reals y;
    memcpy(&y, &x, sizeof y);
    return y;
}

INLINE(TARGET) bits NAMED(as_bits)(reals x) {
    bits y;
    memcpy(&y, &x, sizeof y);
    return y;
}

/* Converts integers below 2**32 to reals: writes them to the last bits of 2**52, and subtracts 2**52. */
INLINE(TARGET) reals NAMED(to_reals)(bits x) { return NAMED(as_reals)(x | 0x4330000000000000ull) - 0x1p52; }

/* Returns sqrt(-ln u), where u = (word + 1/2) / 2**64. */
INLINE(TARGET) reals NAMED(radius)(bits word) {
    const uint64_t root = 0x3fe6a09e667f3bcdull; /* sqrt(1/2) */
    reals u = (NAMED(to_reals)(word >> 32) * 0x1p32 + NAMED(to_reals)(word & 0xffffffffull)) + 0.5;
    bits b = NAMED(as_bits)(u) - root; /* u = m * 2**e, m in [sqrt(1/2), sqrt(2)) */
    reals m = NAMED(as_reals)((b & 0x000fffffffffffffull) + root);
    reals e = NAMED(to_reals)((b + 0x0010000000000000ull) >> 52) - 65.0;
    reals s = (m - 1.0) / (m + 1.0), q = s * s; /* ln m = 2 (s + s**3 / 3 + s**5 / 5 + ...) */
    reals p = q * (1.0 / 15) + (1.0 / 13);
    p = p * q + (1.0 / 11);
    p = p * q + (1.0 / 9);
    p = p * q + (1.0 / 7);
    p = p * q + (1.0 / 5);
    p = p * q + (1.0 / 3);
    p = p * q + 1.0;
    reals square = -(e * 0.6931471805599453 + (s + s) * p), result;
    for (int i = 0; i < REALS; i++) result[i] = __builtin_sqrt(square[i]);
    return result;
}

/* Computes std times the normals of one group. */
INLINE(TARGET) void NAMED(normals)(const uint32_t *key, uint64_t group, double std, double *z) {
    uint32_t keystream[PARTS * 16 * COLUMNS] __attribute__((aligned(64)));
    for (int part = 0; part < PARTS; part++)
        for (int l = 0; l < COLUMNS; l += LANES)
            NAMED(blocks)(key, group * BLOCKS + part * COLUMNS + l, keystream + part * 16 * COLUMNS + l);
    for (int i = 0; i < PAIRS; i += REALS) {
        bits v;
        halves t_words;
        memcpy(&v, keystream + 2 * i, sizeof v);
        memcpy(&t_words, keystream + 2 * PAIRS + i, sizeof t_words);
        bits t = __builtin_convertvector(t_words, bits);
        reals y = (NAMED(to_reals)(t & 0x3fffffffull) - (0x1p29 - 0.5)) * (0.7853981633974483 / 0x1p29), q = y * y;
        reals sine = q * (-1.0 / 39916800) + (1.0 / 362880);
        sine = sine * q + (-1.0 / 5040);
        sine = sine * q + (1.0 / 120);
        sine = sine * q + (-1.0 / 6);
        sine = (sine * q) * y + y;
        reals cosine = q * (1.0 / 479001600) + (-1.0 / 3628800);
        cosine = cosine * q + (1.0 / 40320);
        cosine = cosine * q + (-1.0 / 720);
        cosine = cosine * q + (1.0 / 24);
        cosine = cosine * q + (-0.5);
        cosine = cosine * q + 1.0;
        reals radius = NAMED(radius)(v) * std;
        bits first = NAMED(as_bits)((cosine + sine) * radius) ^ ((t & 0x80000000ull) << 32);
        bits second = NAMED(as_bits)((cosine - sine) * radius) ^ ((t & 0x40000000ull) << 33);
        memcpy(z + i, &first, sizeof first);
        memcpy(z + PAIRS + i, &second, sizeof second);
    }
}

#define ADD(name, number)                                                                                              \
    TARGET static void NAMED(name)(const uint32_t *key, uint64_t first, uint64_t rows, uint64_t length,                \
                                   uint64_t stride, double std, double scale, number *to) {                            \
        double z[GROUP] __attribute__((aligned(64)));                                                                  \
        uint64_t held = UINT64_MAX; /* group in z, which several short rows may use */                                 \
        for (uint64_t row = 0; row < rows; row++, first += stride, to += length)                                       \
            for (uint64_t done = 0; done < length;) {                                                                  \
                uint64_t index = first + done, low = index % GROUP;                                                    \
                uint64_t count = GROUP - low < length - done ? GROUP - low : length - done;                            \
                if (held != index / GROUP) NAMED(normals)(key, held = index / GROUP, std, z);                          \
                for (uint64_t k = 0; k < count; k++) to[done + k] = (number)((to[done + k] + z[low + k]) * scale);     \
                done += count;                                                                                         \
            }                                                                                                          \
    }

ADD(add_normals_f32, float)
ADD(add_normals_f64, double)

#undef ADD
#undef REALS
#undef words
#undef reals
#undef bits
#undef halves
