// Undefine what item.h and the dtype's header have defined.
#undef NAME
#undef VECTORS
#undef LOAD
#undef STORE
#undef GET
#undef PUT
#undef ITEM
#undef REAL
#undef LANES
#undef VECTOR
#undef DTYPE
#undef KIND
