"""The shop as a website: pages for people and browsers, rendered from the same `View` as every observation."""
