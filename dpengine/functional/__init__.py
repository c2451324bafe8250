"""Clipped gradients of plain functions, based on ``torch.func``."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .bounded import AuxiliaryOutput as AuxiliaryOutput
    from .bounded import BoundedSensitivityCallable as BoundedSensitivityCallable
    from .clipped_gradients import clipped_fun as clipped_fun
    from .clipped_gradients import clipped_grad as clipped_grad
    from .clipping import clip_gradient as clip_gradient
    from .clipping import clip_tree as clip_tree
    from .compiled_gradients import compiled as compiled
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "bounded": ["AuxiliaryOutput", "BoundedSensitivityCallable"],
            "clipped_gradients": ["clipped_fun", "clipped_grad"],
            "clipping": ["clip_gradient", "clip_tree"],
            "compiled_gradients": ["compiled"],
        },
    )
