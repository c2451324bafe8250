"""Rules for convolutions."""

from .rules import compute_conv_grad_sample as compute_conv_grad_sample
from .rules import convolution2d_backward_as_a_convolution as convolution2d_backward_as_a_convolution
