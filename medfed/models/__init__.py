"""Task modules (classification, segmentation, risk) and network builders."""
