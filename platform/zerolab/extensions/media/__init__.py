"""Conversion of images, tables, texts, histograms, audio and files for reports."""
