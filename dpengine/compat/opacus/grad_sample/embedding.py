"""Rules for ``nn.Embedding`` and ``nn.EmbeddingBag``."""

from .rules import compute_embedding_grad_sample as compute_embedding_grad_sample
from .rules import compute_embedding_norm_sample as compute_embedding_norm_sample
from .rules import compute_embeddingbag_gradsampler as compute_embeddingbag_gradsampler
