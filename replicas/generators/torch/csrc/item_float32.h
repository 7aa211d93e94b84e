// What item.h needs for float32.
#define ITEM float
#define REAL float
#define LANES FLOATS
#define VECTOR floats
#define KIND floats
#define DTYPE float32
