/* Code for one set of vector instructions. products.c includes it several times. */

#define REALS (LANES / 2)
#define reals NAMED(reals)
#define floats NAMED(floats)
#define reals_of NAMED(reals_of)
#define floats_of NAMED(floats_of)
#define halves_of NAMED(halves_of)

typedef double reals __attribute__((vector_size(8 * REALS)));
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef double reals_of __attribute__((vector_size(8 * REALS), aligned(8), may_alias));
typedef float halves_of __attribute__((vector_size(4 * REALS), aligned(4), may_alias));
typedef float floats_of __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifndef UP
#define UP(number, unit) (((number) + (unit)-1) / (unit) * (unit))
#endif

INLINE(TARGET) double NAMED(total)(reals x) {
    double sum = 0;
    for (int l = 0; l < REALS; l++) sum += x[l];
    return sum;
}

/* Converts a span of features of all positions to float64, padded with zeros. */
TARGET static void NAMED(widen)(const struct factor *factor, uint64_t row, uint64_t positions, uint64_t from,
                                uint64_t span, uint64_t stride, double *out) {
    const float *at = factor->at + row * factor->row_stride + from * factor->feature_stride;
    uint64_t padded = UP(span, REALS);
    for (uint64_t t = 0; t < positions; t++, at += factor->position_stride, out += stride) {
        if (factor->feature_stride == 1)
            for (uint64_t k = 0; k < span; k++) out[k] = at[k];
        else
            for (uint64_t k = 0; k < span; k++) out[k] = at[k * factor->feature_stride];
        for (uint64_t k = span; k < padded; k++) out[k] = 0;
    }
    memset(out, 0, (UP(positions, TILE_SIDE) - positions) * stride * sizeof *out);
}

/* Adds the products of the factors at TILE_SIDE positions with those at TILE_SIDE other positions. */
INLINE(TARGET) void NAMED(tile)(const double *left, const double *right, uint64_t stride, uint64_t span, double *out) {
    reals sum[TILE_SIDE][TILE_SIDE] = {{{0}}};
    for (uint64_t k = 0; k < span; k += REALS) {
        reals left_values[TILE_SIDE];
#pragma GCC unroll 8
        for (int i = 0; i < TILE_SIDE; i++) left_values[i] = *(const reals_of *)(left + i * stride + k);
#pragma GCC unroll 8
        for (int j = 0; j < TILE_SIDE; j++) {
            reals right_values = *(const reals_of *)(right + j * stride + k);
#pragma GCC unroll 8
            for (int i = 0; i < TILE_SIDE; i++) sum[i][j] += left_values[i] * right_values;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE_SIDE; i++)
#pragma GCC unroll 8
        for (int j = 0; j < TILE_SIDE; j++) out[i * TILE_SIDE + j] += NAMED(total)(sum[i][j]);
}

/* A Gram matrix is stored as the tiles on its diagonal, followed by those above it. */
TARGET static uint64_t NAMED(gram_doubles)(uint64_t positions, uint64_t factors) {
    uint64_t blocks = UP(positions, TILE_SIDE) / TILE_SIDE;
    return UP(blocks * TILE_SIDE * (SPAN + 8), 8) + factors * UP(blocks * (blocks + 1) / 2 * TILE_SIDE * TILE_SIDE, 8);
}

TARGET static void NAMED(gram)(const struct factor *factor, uint64_t row, uint64_t positions, double *wide,
                               double *gram) {
    uint64_t blocks = UP(positions, TILE_SIDE) / TILE_SIDE;
    memset(gram, 0, blocks * (blocks + 1) / 2 * TILE_SIDE * TILE_SIDE * sizeof *gram);
    for (uint64_t from = 0; from < factor->width; from += SPAN) {
        uint64_t span = factor->width - from < SPAN ? factor->width - from : SPAN;
        uint64_t stride = UP(span, 16) + 8; /* rows must not all map to the same cache lines */
        NAMED(widen)(factor, row, positions, from, span, stride, wide);
        double *above = gram + blocks * TILE_SIDE * TILE_SIDE;
        for (uint64_t i = 0; i < blocks; i++) {
            const double *left = wide + i * TILE_SIDE * stride;
            NAMED(tile)(left, left, stride, span, gram + i * TILE_SIDE * TILE_SIDE);
            for (uint64_t j = i + 1; j < blocks; j++, above += TILE_SIDE * TILE_SIDE)
                NAMED(tile)(left, wide + j * TILE_SIDE * stride, stride, span, above);
        }
    }
}

/* Returns the sum of the products of corresponding entries of Gram matrices. */
TARGET static double NAMED(entries)(const uint64_t *indices, uint64_t count, const double *grams, uint64_t gram_size,
                                    uint64_t from, uint64_t to) {
    reals sum = {0};
    double tail = 0;
    uint64_t e = from;
    for (; e + REALS <= to; e += REALS) {
        reals product = *(const reals_of *)(grams + indices[0] * gram_size + e);
        for (uint64_t f = 1; f < count; f++) product *= *(const reals_of *)(grams + indices[f] * gram_size + e);
        sum += product;
    }
    for (; e < to; e++) {
        double product = grams[indices[0] * gram_size + e];
        for (uint64_t f = 1; f < count; f++) product *= grams[indices[f] * gram_size + e];
        tail += product;
    }
    return NAMED(total)(sum) + tail;
}

TARGET static void NAMED(squares)(const float *at, uint64_t size, double *out) {
    reals sums[4] = {{0}};
    double tail = 0;
    uint64_t k = 0;
    for (; k + 4 * REALS <= size; k += 4 * REALS)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            reals x = __builtin_convertvector(*(const halves_of *)(at + k + s * REALS), reals);
            sums[s] += x * x;
        }
    for (; k < size; k++) tail += (double)at[k] * (double)at[k];
    *out = NAMED(total)((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail;
}

TARGET static void NAMED(gram_row)(const struct grams *job, uint64_t row, double *work) {
    uint64_t blocks = UP(job->positions, TILE_SIDE) / TILE_SIDE, tiles = blocks * (blocks + 1) / 2;
    uint64_t gram_size = UP(tiles * TILE_SIDE * TILE_SIDE, 8), diagonal = blocks * TILE_SIDE * TILE_SIDE;
    double *grams = work + UP(blocks * TILE_SIDE * (SPAN + 8), 8);
    for (uint64_t f = 0; f < job->factors; f++)
        NAMED(gram)(job->factor + f, row, job->positions, work, grams + f * gram_size);
    const uint64_t *indices = job->product;
    for (uint64_t p = 0; p < job->products; p++) {
        uint64_t count = *indices++;
        double sum = NAMED(entries)(indices, count, grams, gram_size, 0, diagonal), rounding_scale = 0;
        sum += 2 * NAMED(entries)(indices, count, grams, gram_size, diagonal, tiles * TILE_SIDE * TILE_SIDE);
        for (uint64_t t = 0; t < job->positions; t++) {
            double product = 1;
            uint64_t entry = t / TILE_SIDE * TILE_SIDE * TILE_SIDE + t % TILE_SIDE * (TILE_SIDE + 1);
            for (uint64_t f = 0; f < count; f++) product *= grams[indices[f] * gram_size + entry];
            rounding_scale += __builtin_sqrt(product);
        }
        job->sq_norm[p * job->rows + row] = sum < 0 ? 0 : sum; /* keeps NaN */
        job->rounding_scale[p * job->rows + row] = rounding_scale;
        indices += count;
    }
}

/* Copies the windows at `count` positions. Each window is padded with zeros to `stride` numbers. */
TARGET static void NAMED(copy_windows)(const struct outers *job, const float *wide, uint64_t first, uint64_t count,
                                  uint64_t features, uint64_t stride, float *out) {
    const uint64_t *size = job->size, *kernel = job->kernel;
    for (uint64_t t = first; t < first + count; t++, out += stride) {
        uint64_t at[3] = {t / (job->positions[1] * job->positions[2]), t / job->positions[2] % job->positions[1],
                          t % job->positions[2]};
        const float *corner = wide;
        for (int axis = 0; axis < 3; axis++)
            corner += at[axis] * job->stride[axis] * (axis == 0 ? size[1] * size[2] : axis == 1 ? size[2] : 1);
        float *to = out;
        for (uint64_t c = 0; c < job->channels; c++, corner += size[0] * size[1] * size[2])
            for (uint64_t i = 0; i < kernel[0]; i++)
                for (uint64_t j = 0; j < kernel[1]; j++, to += kernel[2]) {
                    const float *from = corner + (i * job->dilation[0] * size[1] + j * job->dilation[1]) * size[2];
                    switch (job->dilation[2] == 1 ? kernel[2] : 0) {
                    case 1: memcpy(to, from, 1 * sizeof *to); break;
                    case 3: memcpy(to, from, 3 * sizeof *to); break;
                    case 4: memcpy(to, from, 4 * sizeof *to); break;
                    case 5: memcpy(to, from, 5 * sizeof *to); break;
                    case 7: memcpy(to, from, 7 * sizeof *to); break;
                    case 8: memcpy(to, from, 8 * sizeof *to); break;
                    case 0:
                        for (uint64_t k = 0; k < kernel[2]; k++) to[k] = from[k * job->dilation[2]];
                        break;
                    default: memcpy(to, from, kernel[2] * sizeof *to);
                    }
                }
        for (uint64_t k = features; k < stride; k++) out[k] = 0;
    }
}

/* Adds the products of `height` channels of `narrow` with `vectors` vectors of features of the windows. */
INLINE(TARGET) void NAMED(strip)(const float *narrow, uint64_t channel, uint64_t position_stride, const float *windows,
                                 uint64_t stride, uint64_t count, float *out, const int height, const int vectors) {
    floats sum[TILE_HEIGHT][2];
    for (int c = 0; c < height; c++)
        for (int v = 0; v < vectors; v++) sum[c][v] = *(const floats_of *)(out + c * stride + v * LANES);
    for (uint64_t t = 0; t < count; t++, narrow += position_stride, windows += stride) {
        floats window[2];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) window[v] = *(const floats_of *)(windows + v * LANES);
#pragma GCC unroll 8
        for (int c = 0; c < height; c++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[c][v] += narrow[c * channel] * window[v];
    }
    for (int c = 0; c < height; c++)
        for (int v = 0; v < vectors; v++) *(floats_of *)(out + c * stride + v * LANES) = sum[c][v];
}

INLINE(TARGET) uint64_t NAMED(features)(const struct outers *job) {
    return job->channels * job->kernel[0] * job->kernel[1] * job->kernel[2];
}

INLINE(TARGET) uint64_t NAMED(positions_per_copy)(const struct outers *job, uint64_t stride) {
    uint64_t positions = job->positions[0] * job->positions[1] * job->positions[2];
    uint64_t per_copy = COPIED_FLOATS / stride < 32 ? 32 : COPIED_FLOATS / stride;
    return positions < per_copy ? positions : per_copy;
}

TARGET static uint64_t NAMED(outer_floats)(const struct outers *job) {
    uint64_t stride = UP(NAMED(features)(job), LANES);
    if (!stride || job->kind != WINDOWS) return UP(3 * job->height, 16); /* the sums in float64 and in float32 */
    return UP((job->height + NAMED(positions_per_copy)(job, stride)) * stride, 16);
}

/* Sums each channel of a group over positions in float64, and rounds the result once. */
TARGET static void NAMED(add_up)(const struct outers *job, const float *narrow, uint64_t positions, double *sums,
                                 float *out) {
    if (job->position_stride == 1) {
        for (uint64_t c = 0; c < job->height; c++, narrow += job->channel_stride) {
            reals sum[2] = {{0}};
            uint64_t t = 0;
            sums[c] = 0;
            for (; t + 2 * REALS <= positions; t += 2 * REALS)
#pragma GCC unroll 2
                for (int s = 0; s < 2; s++)
                    sum[s] += __builtin_convertvector(*(const halves_of *)(narrow + t + s * REALS), reals);
            for (; t < positions; t++) sums[c] += narrow[t];
            sums[c] += NAMED(total)(sum[0] + sum[1]);
        }
    } else {
        for (uint64_t c = 0; c < job->height; c++) sums[c] = 0;
        for (uint64_t t = 0; t < positions; t++, narrow += job->position_stride)
            for (uint64_t c = 0; c < job->height; c++) sums[c] += narrow[c * job->channel_stride];
    }
    for (uint64_t c = 0; c < job->height; c++) out[c] = (float)sums[c];
}

/* Returns the dot product of (`x` - `mean`) and `y`. */
INLINE(TARGET) double NAMED(product)(const float *x, const float *y, uint64_t size, double mean) {
    reals sum = {0};
    double tail = 0;
    uint64_t k = 0;
    for (; k + REALS <= size; k += REALS)
        sum += (__builtin_convertvector(*(const halves_of *)(x + k), reals) - mean) *
               __builtin_convertvector(*(const halves_of *)(y + k), reals);
    for (; k < size; k++) tail += ((double)x[k] - mean) * (double)y[k];
    return NAMED(total)(sum) + tail;
}

/* Writes the mean (0 unless `centered`), and returns 1 / sqrt(mean square of the differences from the mean + eps). */
TARGET static double NAMED(moments)(const float *at, uint64_t size, double eps, int centered, double *mean) {
    reals sum = {0};
    double tail = 0;
    uint64_t k = 0;
    *mean = 0;
    if (centered) {
        for (; k + REALS <= size; k += REALS) sum += __builtin_convertvector(*(const halves_of *)(at + k), reals);
        for (; k < size; k++) tail += at[k];
        *mean = (NAMED(total)(sum) + tail) / size;
    }
    double square = NAMED(product)(at, at, size, *mean); /* the differences add up to 0 */
    return 1 / __builtin_sqrt((square < 0 ? 0 : square) / size + eps);
}

TARGET static void NAMED(normed_row)(const struct outers *job, uint64_t row, double *sums) {
    uint64_t width = job->size[2], run = job->kernel[2];
    const float *at = job->wide + row * job->row_stride, *grad = job->narrow + row * job->row_stride;
    float *out = job->out + row * job->out_row_stride;
    for (uint64_t c = 0; c < job->height; c++) sums[c] = 0;
    for (uint64_t g = 0; g < job->groups; g++, at += width, grad += width) {
        double mean, inverse = NAMED(moments)(at, width, job->eps, job->kind == CENTERED, &mean);
        double *to = sums + g * job->channels;
        if (run == 1)
            for (uint64_t k = 0; k < width; k++) to[k] += (at[k] - mean) * inverse * grad[k];
        else
            for (uint64_t k = 0; k < width; k += run)
                to[k / run] += NAMED(product)(at + k, grad + k, run, mean) * inverse;
    }
    for (uint64_t c = 0; c < job->height; c++) out[c] = (float)sums[c];
    NAMED(squares)(out, job->height, job->sq_norm + row);
}

TARGET static void NAMED(entries_row)(const struct outers *job, uint64_t row) {
    const int64_t *index = (const int64_t *)job->wide + row * job->positions[2];
    const float *grad = job->narrow + row * job->row_stride;
    float *out = job->out + row * job->out_row_stride;
    memset(out, 0, job->size[2] * job->height * sizeof *out);
    for (uint64_t t = 0; t < job->positions[2]; t++, grad += job->height) {
        uint64_t entry = (uint64_t)index[t];
        if (entry == job->kernel[2] || entry >= job->size[2]) continue;
        for (uint64_t c = 0; c < job->height; c++) out[entry * job->height + c] += grad[c];
    }
    NAMED(squares)(out, job->size[2] * job->height, job->sq_norm + row);
}

TARGET static void NAMED(outer_row)(const struct outers *job, uint64_t row, float *work) {
    if (job->kind == CENTERED || job->kind == SCALED) {
        NAMED(normed_row)(job, row, (double *)work);
        return;
    }
    if (job->kind == ENTRIES) {
        NAMED(entries_row)(job, row);
        return;
    }
    uint64_t features = NAMED(features)(job), stride = UP(features, LANES);
    uint64_t per_copy = features ? NAMED(positions_per_copy)(job, stride) : 0;
    uint64_t positions = job->positions[0] * job->positions[1] * job->positions[2];
    int contiguous = job->channels == 1 && features == stride && job->kernel[2] == features &&
                     job->stride[2] == features && positions * features == job->size[2]; /* no copies are needed */
    double square;
    job->sq_norm[row] = 0;
    if (!features) {
        for (uint64_t g = 0; g < job->groups; g++) {
            const float *narrow = job->narrow + row * job->row_stride + g * job->group_stride;
            float *to = work + 2 * job->height;
            if (job->out) to = job->out + row * job->out_row_stride + g * job->height;
            NAMED(add_up)(job, narrow, positions, (double *)work, to);
            NAMED(squares)(to, job->height, &square);
            job->sq_norm[row] += square;
        }
        return;
    }
    for (uint64_t g = 0; g < job->groups; g++) {
        uint64_t group_size = job->channels * job->size[0] * job->size[1] * job->size[2];
        const float *wide = job->wide + (row * job->groups + g) * group_size;
        const float *narrow_of_group = job->narrow + row * job->row_stride + g * job->group_stride;
        float *out = job->out ? job->out + row * job->out_row_stride + g * job->height * features : 0;
        float *windows = work, *sums = out && features == stride ? out : work + per_copy * stride;
        memset(sums, 0, job->height * stride * sizeof *sums);
        for (uint64_t first = 0; first < positions; first += per_copy) {
            uint64_t count = positions - first < per_copy ? positions - first : per_copy;
            if (!contiguous) NAMED(copy_windows)(job, wide, first, count, features, stride, windows);
            const float *from = contiguous ? wide + first * features : windows;
            const float *narrow = narrow_of_group + first * job->position_stride;
            for (uint64_t f = 0, v; f < stride; f += v * LANES) {
                v = f + 2 * LANES <= stride ? 2 : 1;
                for (uint64_t c = 0, h; c < job->height; c += h) {
                    h = c + TILE_HEIGHT <= job->height ? TILE_HEIGHT : 1;
                    const float *by = narrow + c * job->channel_stride;
                    float *to = sums + c * stride + f;
                    if (h == TILE_HEIGHT && v == 2)
                        NAMED(strip)(by, job->channel_stride, job->position_stride, from + f, stride, count, to,
                                     TILE_HEIGHT, 2);
                    else if (h == TILE_HEIGHT)
                        NAMED(strip)(by, job->channel_stride, job->position_stride, from + f, stride, count, to,
                                     TILE_HEIGHT, 1);
                    else if (v == 2)
                        NAMED(strip)(by, job->channel_stride, job->position_stride, from + f, stride, count, to, 1, 2);
                    else
                        NAMED(strip)(by, job->channel_stride, job->position_stride, from + f, stride, count, to, 1, 1);
                }
            }
        }
        uint64_t lines = features == stride ? 1 : job->height;
        uint64_t size = features == stride ? job->height * features : features;
        for (uint64_t c = 0; c < lines; c++) {
            const float *sum = sums + c * stride;
            NAMED(squares)(sum, size, &square);
            job->sq_norm[row] += square;
            if (out && sum != out) memcpy(out + c * features, sum, features * sizeof *sum);
        }
    }
}

#undef REALS
#undef reals
#undef floats
#undef reals_of
#undef floats_of
#undef halves_of
#undef LANES
#undef TILE_SIDE
#undef TILE_HEIGHT
#undef TARGET
#undef NAMED
