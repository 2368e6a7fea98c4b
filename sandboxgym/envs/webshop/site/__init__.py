"""The shop as a web site: pages for people and browsers, rendered from the same `View` as every observation."""
