"""All that a bundle needs: from files to what a model says of them, and back to files.

medfed itself uses these modules, and every bundle holds them as they are in its folder ``scripts``.
So they import each other alone, relatively, and PyTorch, MONAI and what these read files with.
"""
