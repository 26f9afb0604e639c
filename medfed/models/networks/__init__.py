"""Network builders around MONAI, and the part of a network that stays personal.

The parameter counts say how far the builders agree with the published experiments of pFedNet:

========================  =========  ===========================================================
Network                   Published  Here
========================  =========  ===========================================================
DenseNet-BC, growth 6     197,936    198,224 with MONAI's 7×7 stem; the difference of 288 is that
                                     of a 5×5 stem. 197,744 with ``stem="small"``.
U-Net, width 8            486,562    488,394 for ``basic_unet`` as MONAI builds it (3 channels in,
                                     2 out, batch norm); 486,562 with ``published=True``.

========================  =========  ===========================================================
"""
