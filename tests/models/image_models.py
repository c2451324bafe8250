"""Classification families of torchvision and timm, as small as their arguments allow."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .row import Row, image, without_dropout

CLASSES = {"num_classes": 5}
TORCHVISION = {
    "alexnet": 64,
    "convnext_tiny": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "googlenet": 96,
    "inception_v3": 96,
    "maxvit_t": 64,
    "mnasnet0_5": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64,
    "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 96,
    "squeezenet1_1": 64,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11": 32,
    "vgg11_bn": 32,
    "vit_b_16": 32,
    "wide_resnet50_2": 64,
}
BLOCKS = {"embed_dim": 24, "depth": 2, "num_heads": 2}
STAGES = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
FOUR = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}
TIMM = {
    "vit_tiny_patch16_224": (32, BLOCKS),
    "deit_tiny_distilled_patch16_224": (32, BLOCKS),
    "deit3_small_patch16_224": (32, BLOCKS),
    "beit_base_patch16_224": (32, BLOCKS),
    "beitv2_base_patch16_224": (32, BLOCKS),
    "eva02_tiny_patch14_224": (28, BLOCKS),
    "cait_xxs24_224": (32, BLOCKS),
    "xcit_nano_12_p16_224": (32, BLOCKS),
    "convit_tiny": (32, {**BLOCKS, "local_up_to_layer": 1}),
    "vit_relpos_small_patch16_224": (32, BLOCKS),
    "MlpMixer": (32, {"embed_dim": 24, "num_blocks": 2}),
    "swin_tiny_patch4_window7_224": (32, STAGES),
    "swinv2_tiny_window8_256": (32, STAGES),
    "swinv2_cr_tiny_224": (32, STAGES),
    "DaVit": (32, {"embed_dims": (8, 16), "num_heads": (1, 2), "depths": (1, 1), "window_size": 4}),
    "FocalNet": (32, {"embed_dim": 8, "depths": (1, 1)}),
    "Nest": (64, {"embed_dims": (8, 16, 16), "num_heads": (1, 2, 2), "depths": (1, 1, 1)}),
    "MetaFormer": (64, {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}),
    "efficientformer_l1": (224, {**FOUR, "depths": (1, 1, 1, 2), "num_vit": 1}),
    "pit_ti_224": (32, {"base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 2)}),
    "levit_128s": (64, {"embed_dim": (16, 24, 32), "key_dim": 4, "num_heads": (2, 2, 2), "depth": (1, 1, 1)}),
    "twins_svt_small": (
        32,
        {
            "embed_dims": (8, 16),
            "num_heads": (1, 2),
            "depths": (1, 1),
            "mlp_ratios": (2, 2),
            "sr_ratios": (2, 1),
            "wss": (4, 4),
        },
    ),
    "pvt_v2_b0": (64, {**FOUR, "num_heads": (1, 1, 2, 2)}),
    "coat_lite_tiny": (64, {"embed_dims": (8, 8, 16, 16), "serial_depths": (1, 1, 1, 1), "num_heads": 8}),
    "tiny_vit_5m_224": (64, {**FOUR, "num_heads": (1, 1, 2, 2), "window_sizes": (4, 4, 4, 4)}),
    "hiera_tiny_224": (64, {"embed_dim": 8, "stages": (1, 1, 1, 1), "num_heads": 1}),
    "sequencer2d_s": (32, {"layers": (1, 1, 1, 1)}),
    "visformer_tiny": (32, {"embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "fastvit_t8": (64, {}),
    "repvit_m0_9": (64, {}),
    "ghostnet_050": (64, {}),
    "tinynet_e": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_050": (96, {}),
    "efficientnet_lite0": (64, {}),
    "lcnet_035": (64, {}),
    "hardcorenas_a": (64, {}),
    "efficientvit_b0": (64, {}),
    "starnet_s1": (64, {}),
    "resnet10t": (64, {}),
    "resnetv2_50": (64, {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64)}),
    "resnest14d": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "dla46_c": (64, {}),
    "DenseNet": (64, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    "nf_resnet26": (64, {}),
    "selecsls42": (128, {}),
    "skresnet18": (64, {}),
    "convnext_atto": (64, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "convnextv2_atto": (64, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "inception_next_atto": (64, {}),
    "mambaout_femto": (64, {}),
    "test_byobnet": (64, {}),
    "test_coatnet": (64, {}),
    "test_maxvit": (64, {}),
    "test_efficientnet_evos": (64, {}),
    "test_nfnet": (64, {}),
}


def of_torchvision(name, side):
    from torchvision import models

    torch.manual_seed(0)
    model = _small_of_torchvision(name, side, models)
    for part in model.modules():
        if isinstance(part, models.vgg.VGG | models.AlexNet):  # these layers hold most of the weights
            wide = [layer for layer in part.classifier if isinstance(layer, nn.Linear)]
            part.classifier = nn.Sequential(nn.Linear(wide[0].in_features, 8), nn.ReLU(), nn.Linear(8, 5))
    return without_dropout(model)


def _small_of_torchvision(name, side, models):
    """The architecture of a family, with fewer and narrower layers where its class has arguments for that."""
    swin, resnet, mobile = models.swin_transformer, models.resnet, models.mobilenetv3
    if name.startswith("swin"):
        v2 = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if "v2" in name else {}
        return swin.SwinTransformer([4, 4], 8, [1, 1], [1, 2], [4, 4], stochastic_depth_prob=0.0, **v2, **CLASSES)
    if name.startswith("regnet"):
        block = models.regnet.BlockParams.from_init_params(4, 8, 8.0, 2.0, 8, se_ratio=0.25 if "y" in name else None)
        return models.RegNet(block, stem_width=8, **CLASSES)
    make = {
        "convnext_tiny": lambda: models.ConvNeXt(
            [models.convnext.CNBlockConfig(8, 16, 1), models.convnext.CNBlockConfig(16, None, 1)], **CLASSES
        ),
        "densenet121": lambda: models.DenseNet(8, (2, 2, 2, 2), 16, **CLASSES),
        "googlenet": lambda: models.GoogLeNet(aux_logits=False, init_weights=False, **CLASSES),
        "inception_v3": lambda: models.Inception3(aux_logits=False, init_weights=False, **CLASSES),
        "maxvit_t": lambda: models.MaxVit((side, side), 8, 4, [8, 16], [1, 1], 8, 0.0, **CLASSES),
        "mnasnet0_5": lambda: models.MNASNet(0.25, **CLASSES),
        "mobilenet_v2": lambda: models.MobileNetV2(width_mult=0.1, **CLASSES),
        "mobilenet_v3_small": lambda: models.MobileNetV3(
            *mobile._mobilenet_v3_conf("mobilenet_v3_small", width_mult=0.25), **CLASSES
        ),
        "efficientnet_b0": lambda: models.EfficientNet(
            models.efficientnet._efficientnet_conf("efficientnet_b0", width_mult=0.1, depth_mult=0.2)[0],
            0.0,
            last_channel=64,
            **CLASSES,
        ),
        "efficientnet_v2_s": lambda: models.EfficientNet(
            [
                models.efficientnet.FusedMBConvConfig(4, 3, 2, 8, 16, 1),
                models.efficientnet.MBConvConfig(4, 3, 2, 16, 16, 1),
            ],
            0.0,
            last_channel=64,
            **CLASSES,
        ),
        "resnet18": lambda: models.ResNet(resnet.BasicBlock, [1, 1, 1, 1], **CLASSES),
        "resnext50_32x4d": lambda: models.ResNet(
            resnet.Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=4, **CLASSES
        ),
        "wide_resnet50_2": lambda: models.ResNet(resnet.Bottleneck, [1, 1, 1, 1], width_per_group=32, **CLASSES),
        "vit_b_16": lambda: models.VisionTransformer(side, 8, 2, 2, 16, 32, **CLASSES),
    }
    return make.get(name, partial(getattr(models, name), **CLASSES))()


def of_timm(name, side, given):
    import timm

    torch.manual_seed(0)
    model = None
    make = getattr(timm.models, name) if name[0].isupper() else partial(timm.create_model, name)
    for size in ({"img_size": side}, {}):  # only some models accept an image size
        try:
            model = make(**CLASSES, **size, **given)
            break
        except TypeError as error:
            if "img_size" not in str(error):
                raise
    return without_dropout(model)


def rows():
    found = [
        Row(
            "Families of torchvision",
            name,
            lambda name=name, side=side: of_torchvision(name, side),
            image(side),
            "torchvision",
        )
        for name, side in TORCHVISION.items()
    ]
    return found + [
        Row(
            "Families of timm",
            name,
            lambda name=name, side=side, given=given: of_timm(name, side, given),
            image(side),
            "timm",
        )
        for name, (side, given) in TIMM.items()
    ]
