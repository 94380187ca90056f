"""Figures in the documents that are written from results, and tables that are written from the code."""
