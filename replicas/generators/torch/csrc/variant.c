// The kernels of one instruction set.
#include "internal.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

const kernel_set VARIANT(kernel_set) = {
    .name = TEXT(KERNEL_VARIANT),
    .features = KERNEL_NEEDS,
    .attention = VARIANT(attention),
    .norm = VARIANT(norm),
    .rope = VARIANT(rope),
    .product = VARIANT(product),
    .token_layers = VARIANT(token_layers),
    .weight_layers = VARIANT(weight_layers),
    .logprobs = VARIANT(logprobs),
    .delta = VARIANT(delta),
};
