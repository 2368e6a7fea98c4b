"""WebShop: an exact re-implementation, with snapshots, of the shop, its search and its reward."""
