/* Code for one set of vector instructions; the compiler vectorizes the inner loops. recurrent.c includes it several
   times. */

#define exp_parts NAMED(exp_parts)
#define sigmoid NAMED(sigmoid)
#define tanh_f32 NAMED(tanh_f32)

/* Splits x into n ln 2 + r with |r| <= ln(2) / 2. Returns exp(r) - 1, with an error of 1e-8, and writes 2^n to `power`.
   Keeps NaN. */
INLINE(TARGET) float exp_parts(float x, float *power) {
    float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f; /* rounded to an integer */
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;                    /* the first product is exact */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;
    memcpy(power, &bits, sizeof bits);
    return r + r * r * ((((0x1.6d4326p-10f * r + 0x1.120b7p-7f) * r + 0x1.5554eap-5f) * r + 0x1.5554dcp-3f) * r + 0.5f);
}

INLINE(TARGET) float sigmoid(float x) {
    float y = -x, power;
    y = y < -87.0f ? -87.0f : y; /* keeps NaN, whose comparisons are false */
    y = y > 89.0f ? 89.0f : y;   /* 2^128 is infinite, so the result is 0 */
    float expm1_r = exp_parts(y, &power);
    return 1.0f / (1.0f + power * (1.0f + expm1_r));
}

/* Computes tanh from exp(2 x) - 1, which is accurate for small numbers. */
INLINE(TARGET) float tanh_f32(float x) {
    float y = x + x, power;
    y = y < -40.0f ? -40.0f : y;
    y = y > 40.0f ? 40.0f : y;
    float expm1_r = exp_parts(y, &power);
    float expm1_f32 = (power - 1.0f) + power * expm1_r;
    return expm1_f32 / (expm1_f32 + 2.0f);
}

TARGET static void NAMED(lstm_step)(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow,
                                    uint64_t output_stride, const float *hidden, const float *bias, float *gates,
                                    const float *c_old, float *c_new, float *output, float *packed) {
    for (uint64_t row = 0; row < rows; row++) {
        const float *h = hidden + row * 4 * size, *old = c_old + row * narrow;
        float *gate = gates + row * wide, *new = c_new + row * narrow;
        float *out = output + row * output_stride, *packed_row = packed + row * size;
#pragma GCC ivdep
        for (uint64_t k = 0; k < size; k++) {
            uint64_t at_f = size + k, at_g = 2 * size + k, at_o = 3 * size + k;
            float i = sigmoid(gate[k] + (h[k] + bias[k])), f = sigmoid(gate[at_f] + (h[at_f] + bias[at_f]));
            float g = tanh_f32(gate[at_g] + (h[at_g] + bias[at_g]));
            float o = sigmoid(gate[at_o] + (h[at_o] + bias[at_o]));
            float c = f * old[k] + i * g;
            gate[k] = i, gate[at_f] = f, gate[at_g] = g, gate[at_o] = o;
            new[k] = c;
            out[k] = packed_row[k] = o * tanh_f32(c);
        }
    }
}

TARGET static void NAMED(lstm_back)(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t grad_stride,
                                    const float *gates, const float *c_old, const float *c_new, const float *grad,
                                    float *grad_c, float *delta, float *packed) {
    for (uint64_t row = 0; row < rows; row++) {
        const float *gate = gates + row * wide, *old = c_old + row * narrow, *new = c_new + row * narrow;
        const float *by_output = grad + row * grad_stride;
        float *by_c = grad_c + row * size, *to = delta + row * wide, *packed_row = packed + row * 4 * size;
#pragma GCC ivdep
        for (uint64_t k = 0; k < size; k++) {
            uint64_t at_f = size + k, at_g = 2 * size + k, at_o = 3 * size + k;
            float i = gate[k], f = gate[at_f], g = gate[at_g], o = gate[at_o], tanh_c = tanh_f32(new[k]);
            float c = by_c[k] + by_output[k] * (o * (1.0f - tanh_c * tanh_c));
            to[k] = packed_row[k] = g * i * (1.0f - i) * c;
            to[at_f] = packed_row[at_f] = old[k] * f * (1.0f - f) * c;
            to[at_g] = packed_row[at_g] = i * (1.0f - g * g) * c;
            to[at_o] = packed_row[at_o] = tanh_c * o * (1.0f - o) * by_output[k];
            by_c[k] = c * f;
        }
    }
}

TARGET static void NAMED(gru_step)(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t extra_stride,
                                   const float *hidden, const float *bias, float *gates, float *extra,
                                   const float *h_old, float *h_new, float *packed) {
    for (uint64_t row = 0; row < rows; row++) {
        const float *h = hidden + row * 3 * size, *old = h_old + row * narrow;
        float *gate = gates + row * wide, *new = h_new + row * narrow;
        float *hidden_n = extra + row * extra_stride, *packed_row = packed + row * size;
#pragma GCC ivdep
        for (uint64_t k = 0; k < size; k++) {
            uint64_t at_z = size + k, at_n = 2 * size + k;
            float r = sigmoid(gate[k] + (h[k] + bias[k])), z = sigmoid(gate[at_z] + (h[at_z] + bias[at_z]));
            float candidate = h[at_n] + bias[at_n], n = tanh_f32(gate[at_n] + r * candidate);
            gate[k] = r, gate[at_z] = z, gate[at_n] = n;
            hidden_n[k] = candidate;
            new[k] = packed_row[k] = n + z * (old[k] - n);
        }
    }
}

TARGET static void NAMED(gru_back)(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t extra_stride,
                                   const float *gates, const float *extra, const float *h_old, const float *grad,
                                   float *grad_old, float *delta, float *delta_hidden, float *packed) {
    for (uint64_t row = 0; row < rows; row++) {
        const float *gate = gates + row * wide, *hidden_n = extra + row * extra_stride, *old = h_old + row * narrow;
        const float *by_new = grad + row * narrow;
        float *by_old = grad_old + row * narrow, *to = delta + row * wide, *to_hidden = delta_hidden + row * wide;
        float *packed_row = packed + row * 3 * size;
#pragma GCC ivdep
        for (uint64_t k = 0; k < size; k++) {
            uint64_t at_z = size + k, at_n = 2 * size + k;
            float r = gate[k], z = gate[at_z], n = gate[at_n];
            float by_n = (1.0f - z) * (1.0f - n * n) * by_new[k];
            to[k] = to_hidden[k] = packed_row[k] = by_n * hidden_n[k] * r * (1.0f - r);
            to[at_z] = to_hidden[at_z] = packed_row[at_z] = (old[k] - n) * z * (1.0f - z) * by_new[k];
            to[at_n] = by_n;
            to_hidden[at_n] = packed_row[at_n] = by_n * r;
            by_old[k] += by_new[k] * z;
        }
    }
}

#undef exp_parts
#undef sigmoid
#undef tanh_f32
