// Loads and stores of one dtype, named by what one of item_float32.h and its like has defined:
// ITEM (as stored), REAL (as computed), LANES and VECTOR (of REAL), and as suffixes of names DTYPE
// and KIND (of vector).
#ifndef NAME
#define NAME(function) JOIN(function, DTYPE)
#define VECTORS(function) JOIN(function, KIND)
#define LOAD(from) NAME(load)(from)
#define STORE(to, x) NAME(store)(to, x)

// One number, and a number or vector rounded as it would be stored.
#define GET(from) NAME(get)(from)
#define PUT(to, x) NAME(put)(to, x)

INLINE REAL NAME(get)(const ITEM *from) {
  return _Generic((ITEM)0, bf16: widen_bfloat16((bf16)*from), default: (REAL)*from);
}

INLINE void NAME(put)(ITEM *to, REAL x) {
  *to = _Generic((ITEM)0, bf16: round_bfloat16((float)x), default: (ITEM)x);
}

INLINE VECTOR NAME(rounded)(VECTOR x) {
  ITEM stored[LANES];
  STORE(stored, x);
  return LOAD(stored);
}

INLINE REAL NAME(rounded_one)(REAL x) {
  ITEM stored;
  PUT(&stored, x);
  return GET(&stored);
}
#endif
