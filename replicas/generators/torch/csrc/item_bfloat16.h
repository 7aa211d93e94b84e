// What item.h needs for bfloat16.
#define ITEM bf16
#define REAL float
#define LANES FLOATS
#define VECTOR floats
#define KIND floats
#define DTYPE bfloat16
