"""Figures from measured data, as SVG text: small files, readable on light and dark pages."""
