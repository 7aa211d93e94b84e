// What item.h needs for float64.
#define ITEM double
#define REAL double
#define LANES DOUBLES
#define VECTOR doubles
#define KIND doubles
#define DTYPE float64
