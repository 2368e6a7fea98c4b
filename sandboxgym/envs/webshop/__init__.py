"""WebShop: an exact, snapshottable re-implementation of the shop, its search and its reward."""
