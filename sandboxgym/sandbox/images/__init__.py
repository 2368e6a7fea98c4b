"""Layers of images from registries: kept on a node by digest, fetched once per fleet, handed to the Docker daemon."""
