/* Elementwise part of one step of LSTM and GRU, without the matrix products. dpengine/layers/cells.py defines the
   steps. Here exp is a polynomial, and the error of sigmoid and tanh is at most 2e-7.

   A row (sample) has `size` numbers for each gate. The stride between rows is `wide` for the gates and their gradients,
   and `narrow` for states. Operands and results of matrix products are packed, without gaps between rows. All numbers
   are float32. Rows are independent, so a value that is not finite affects only its own row. */

#include <stdint.h>
#include <string.h>

#include "vectors.h"

#if defined(__x86_64__)

#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "recurrent_body.h"
#undef TARGET
#undef NAMED

#define TARGET AVX2
#define NAMED(name) name##_avx2
#include "recurrent_body.h"
#undef TARGET
#undef NAMED

#endif

#define TARGET
#define NAMED(name) name##_any
#include "recurrent_body.h"

void lstm_step_f32(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t output_stride,
                   const float *hidden, const float *bias, float *gates, const float *c_old, float *c_new,
                   float *output, float *packed) {
    (BEST(lstm_step))(rows, size, wide, narrow, output_stride, hidden, bias, gates, c_old, c_new, output, packed);
}

void lstm_back_f32(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t grad_stride,
                   const float *gates, const float *c_old, const float *c_new, const float *grad, float *grad_c,
                   float *delta, float *packed) {
    (BEST(lstm_back))(rows, size, wide, narrow, grad_stride, gates, c_old, c_new, grad, grad_c, delta, packed);
}

void gru_step_f32(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t extra_stride,
                  const float *hidden, const float *bias, float *gates, float *extra, const float *h_old, float *h_new,
                  float *packed) {
    (BEST(gru_step))(rows, size, wide, narrow, extra_stride, hidden, bias, gates, extra, h_old, h_new, packed);
}

void gru_back_f32(uint64_t rows, uint64_t size, uint64_t wide, uint64_t narrow, uint64_t extra_stride,
                  const float *gates, const float *extra, const float *h_old, const float *grad, float *grad_old,
                  float *delta, float *delta_hidden, float *packed) {
    (BEST(gru_back))(rows, size, wide, narrow, extra_stride, gates, extra, h_old, grad, grad_old, delta, delta_hidden,
                     packed);
}
