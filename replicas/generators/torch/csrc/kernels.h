// Interface between native.py and the kernels of the torch generator and of sampling.
//
// A kernel is a function of one call structure. Every thread of a team runs it with the same
// structure and takes tasks from it until none are left. `native.py` mirrors each structure;
// layout.c lists their fields, and loading fails where the two disagree.
//
// Kernels trust their arguments. Call the matching `check` first: it reports what a kernel cannot
// compute, or would read or write outside its arrays.
#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

// Storage type of tensors. bfloat16 is computed in float32.
enum kernel_dtype { KERNEL_FLOAT32 = 0, KERNEL_BFLOAT16 = 1, KERNEL_FLOAT64 = 2 };

// Results of a check. UNSUPPORTED: valid, but for another implementation.
enum kernel_status {
  KERNEL_OK = 0,
  KERNEL_UNSUPPORTED = 1,
  KERNEL_BAD_SIZE = 2,   // a size is not positive, or contradicts another
  KERNEL_BAD_INDEX = 3,  // an index lies outside the array that it is for
  KERNEL_NULL = 4,       // an array is missing
};

// Instruction sets, as bits. A kernel set is chosen by what the processor has.
enum kernel_feature {
  KERNEL_AVX2 = 1,        // AVX2, FMA
  KERNEL_AVX512 = 2,      // AVX-512 F, BW, DQ, VL and BF16
  KERNEL_AMX = 4,         // AMX tiles of bfloat16, permitted by the operating system
};

// Work that threads take task by task. `next` is 0 before a call.
typedef struct kernel_tasks {
  int64_t next;
  int64_t count;
} kernel_tasks;

enum {
  ATTENTION_TILE = 8,         // tokens of a prompt that read a key together
  ATTENTION_MAX_WIDTH = 1024  // numbers of a key or value
};

// Causal attention of tiles of neighbouring tokens over the blocks of their sequences.
// A task is one tile and one KV head with its query heads.
typedef struct attention_call {
  kernel_tasks tasks;
  int64_t dtype;
  const void *q;         // (tokens, heads, key width)
  void *out;             // (tokens, heads, value width)
  int64_t q_stride;      // numbers between tokens; the heads of a token follow one another
  int64_t out_stride;
  int64_t num_tokens;    // tokens of q and out
  const void *keys;      // (blocks, KV heads, block size, key stride), key width of them used
  const void *values;    // (blocks, KV heads, block size, value stride); may be part of the keys
  int64_t key_stride;    // numbers between the tokens of a block
  int64_t value_stride;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t share;         // query heads of a KV head
  int64_t block_size;
  int64_t key_width;
  int64_t value_width;
  int64_t num_tiles;
  int64_t tile_size;       // tokens of a tile at most: 1 or ATTENTION_TILE
  const int64_t *tokens;   // (tiles,), first token of each in q and out
  const int64_t *counts;   // (tiles,), 1 to tile_size
  const int64_t *lengths;  // (tiles,), keys that the last token of each sees, without a window
  const int64_t *requests; // (tiles,), rows of tables
  const int64_t *tables;   // (requests, table width), blocks of a sequence in order
  int64_t num_requests;
  int64_t table_width;
  double scale;            // factor of the scores
  double soft_cap;         // scores become cap * tanh(score / cap); 0: not
  int64_t window;          // keys that a token sees at most, itself included; 0: all
  const void *sinks;       // (heads,), a score each that has no value; NULL: none
} attention_call;

// Root mean square norm of rows. A task is a row.
typedef struct norm_call {
  kernel_tasks tasks;
  int64_t dtype;
  const void *x;  // (rows, size), `stride` numbers apart
  int64_t stride;
  const void *weight;  // (size,)
  void *out;           // (rows, size)
  int64_t size;
  double eps;
  double weight_offset;  // 0: rounded, times the weight. Else times weight + offset, as Gemma
} norm_call;

// Norm and rotation of queries and keys in place; keys and values are copied into their blocks.
// A task is a token.
typedef struct rope_call {
  kernel_tasks tasks;
  int64_t dtype;
  void *heads;  // (tokens, query heads + 2 * KV heads, head size): queries, keys, values
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t rotary_size;         // numbers of a head that rotate: channel i with i + size / 2
  const void *cos;             // (positions, rotary size), the cosines twice
  const void *sin;             // (positions, rotary size), negated sines, then sines
  int64_t num_positions;
  const int64_t *positions;    // (tokens,)
  const int64_t *kv_positions; // (tokens,), block * block size + offset
  void *keys;                  // (blocks, KV heads, block size, head size)
  void *values;
  int64_t num_blocks;
  int64_t block_size;
  const void *norm;  // (query heads + KV heads, head size), or NULL: no norm
  double eps;
} rope_call;

enum { PANEL_COLUMNS = 64 };  // columns of a weight matrix that are packed together

// What becomes of a product before it is rounded; the other operand has the product's shape.
enum product_then { PRODUCT_ONLY = 0, PRODUCT_PLUS = 1, PRODUCT_TIMES = 2, PRODUCT_SWISH = 3 };

// A packed weight matrix of bfloat16.
typedef struct packed_matrix {
  const void *weight;   // (panels, inputs / 2, 64, 2), whole vectors aligned to 64 bytes
  const void *bias;     // (outputs,), or NULL
  int64_t num_inputs;   // even
  int64_t num_outputs;
  int64_t uses_tiles;   // 1: computed by AMX; the inputs are then a multiple of 32
} packed_matrix;

// Product of rows and a packed matrix, plus its bias. A task is a panel and some of the rows.
typedef struct product_call {
  kernel_tasks tasks;
  packed_matrix matrix;
  const void *x;         // (rows, inputs)
  int64_t num_rows;
  int64_t rows_of_task;  // at most; a multiple of 32
  int64_t then;          // a product_then
  const void *other;     // (rows, outputs), or NULL
  void *out;             // (rows, outputs); may be `other`
} product_call;

// Weights of a decoder layer and the planes of its keys and values.
typedef struct decoder_layer {
  const void *input_norm;  // (hidden,)
  packed_matrix qkv;
  const void *head_norm;   // (query heads + KV heads, head size), or NULL
  packed_matrix o;
  const void *post_norm;   // (hidden,)
  packed_matrix gate;
  packed_matrix up;
  packed_matrix down;
  void *keys;              // (blocks, KV heads, block size, head size)
  void *values;
  int64_t window;          // keys that a token sees at most, itself included; 0: all
  int64_t group;           // KV group, whose blocks it has
} decoder_layer;

// The layers, the cache and the tokens of a pass, all of bfloat16.
typedef struct layers_pass {
  const decoder_layer *layers;
  int64_t num_layers;
  int64_t is_end;      // 1: nothing but `wanted` is computed after the last layer's attention
  int64_t hidden_size;
  int64_t inner_size;
  int64_t num_kv_heads;
  int64_t share;       // query heads of a KV head
  int64_t head_size;
  int64_t rotary_size;
  double eps;
  double scale;        // factor of the scores
  int64_t num_groups;  // KV groups: layers whose blocks have the same ids
  const int64_t *num_blocks;    // (groups,)
  int64_t block_size;
  const void *cos;     // (positions, rotary size), see rope_call
  const void *sin;
  int64_t num_positions;
  int64_t num_tokens;
  void *x;             // (tokens, hidden), in place
  const int64_t *positions;     // (tokens,)
  const int64_t *kv_positions;  // (groups, tokens)
  int64_t num_requests;
  const int64_t *lengths;       // (requests,), keys that the last token of each sees
  const int64_t *tables;        // (groups, requests, table width)
  int64_t table_width;
  int64_t num_wanted;
  const int64_t *wanted;        // (wanted,), tokens in order
  void *out;                    // (wanted, hidden), where `is_end`
} layers_pass;

// Layers over units of neighbouring tokens. A task is a unit in one layer; tasks are taken in order,
// layer by layer, so that all threads read the weights of a layer while these are in the caches.
typedef struct token_layers_call {
  kernel_tasks tasks;
  layers_pass pass;
  int64_t num_threads;  // that take tasks
  int64_t entered;      // threads that have begun; 0 before a call
  int64_t num_units;
  int64_t max_rows;              // tokens of the greatest unit
  const int64_t *starts;         // (requests + 1,), first token of each request, and the number
  const int64_t *cuts;           // (units + 1,), the same of units
  const int64_t *unit_requests;  // (units,), request of each unit's first token
  const int64_t *needs;          // (units,), first unit with tokens of that request
  const int64_t *unit_wanted;    // (units + 1,), index in `wanted` of each unit's first
  int64_t *stored;  // (units,), layers whose keys and values are stored; 0 before a call
  int64_t *done;    // (units,), layers that are computed; 0 before a call
  void *scratch;    // (num_threads, scratch_size) numbers
  int64_t scratch_size;  // max_rows * (hidden + (2 heads + 2 KV heads) * head size + inner)
} token_layers_call;

enum {
  SHARE_PHASES = 7,      // of a layer; see layers.c
  SHARE_ROTATE_ROWS = 8  // tokens that are rotated in one task
};

// Layers with the weights divided among threads, for few tokens. A task is a part of a phase of a
// layer: panels of a matrix, rows or heads. A phase begins when the previous one has ended.
typedef struct weight_layers_call {
  kernel_tasks tasks;
  layers_pass pass;
  int64_t num_tiles;            // of tokens that attend together, see attention_call
  const int64_t *tiles;         // (4, tiles): tokens, counts, lengths, requests
  const int64_t *are_alone;     // (tiles,), 1 for the only token of a request
  const int64_t *phase_tasks;   // (SHARE_PHASES,), number of tasks of each phase
  int64_t *done;     // (layers * SHARE_PHASES,), finished tasks of each phase; 0 before a call
  void *heads;       // (tokens, query heads + 2 * KV heads, head size)
  void *attended;    // (tokens, query heads, head size)
  void *gated;       // (tokens, inner)
  int64_t num_threads;
  int64_t entered;   // threads that have begun; 0 before a call
  void *normed;      // (num_threads, tokens, hidden)
} weight_layers_call;

// Logits and ranks of tokens of each row, and what makes log probabilities of logits. The entries of
// a row are given tokens, then its likeliest ones, of which the lower token comes first if equal. A
// rank is the number of tokens that are at least as likely. A task is a row.
typedef struct logprobs_call {
  kernel_tasks tasks;
  int64_t dtype;             // of the logits: float32 or bfloat16
  const void *logits;        // (logit rows, vocabulary)
  int64_t num_logit_rows;
  int64_t vocabulary;
  const int64_t *places;     // (rows,), which of the logit rows
  const int64_t *firsts;     // (rows + 1,), first entry of each row, and the number of entries
  const int64_t *num_given;  // (rows,), tokens that are given
  int64_t *tokens;           // (entries,), those of likeliest ones are written
  float *values;             // (entries,), their logits
  int64_t *ranks;            // (entries,)
  double *log_sums;          // (rows,), logarithm of the sum of the powers of e of the logits
} logprobs_call;

// A token of each of some sequences in a recurrent layer: a convolution over the tokens before it, a
// swish, and a gated delta rule; see delta.py. A task is a token and a key head with its value heads.
typedef struct delta_call {
  kernel_tasks tasks;
  int64_t dtype;        // of all numbers: float32 or float64
  const void *mixed;    // (tokens, channels): all queries, keys, values
  int64_t mixed_stride; // numbers between tokens
  int64_t num_tokens;
  const void *rates;    // (tokens, value heads)
  const void *decays;   // (tokens, value heads), at most 0
  void *out;            // (tokens, value heads, value dim)
  void *states;         // (blocks, state size): (value heads, key dim, value dim), then the tail,
                        // (kernel - 1, channels)
  int64_t state_size;
  int64_t num_blocks;
  const void *convolution;  // (kernel, channels)
  int64_t key_heads;
  int64_t share;        // value heads of a key head
  int64_t key_dim;
  int64_t value_dim;
  int64_t kernel;       // tokens that the convolution sees
  int64_t num_singles;
  const int64_t *tokens;    // (singles,)
  const int64_t *read;      // (singles,), block of the state before each
  const int64_t *written;   // (singles,), of the state after it; nothing else reads or writes it
  const uint8_t *is_first;  // (singles,), 1: no token is before, what is in `read` counts as zeros
  void *scratch;        // (tasks, 2 * key dim + 2 * value dim)
} delta_call;

// A kernel: one thread's part of a call.
typedef void kernel_function(void *call);

// All kernels, compiled for one instruction set.
typedef struct kernel_set {
  const char *name;
  int64_t features;  // that it needs
  kernel_function *attention;
  kernel_function *norm;
  kernel_function *rope;
  kernel_function *product;
  kernel_function *token_layers;
  kernel_function *weight_layers;
  kernel_function *logprobs;
  kernel_function *delta;
} kernel_set;

// A field of a structure, for native.py to compare with its own. The last one has no name.
typedef struct kernel_field {
  const char *structure;
  const char *field;  // "" for the structure itself, whose size this is
  int64_t offset;
  int64_t size;
} kernel_field;

#define KERNEL_EXPORT __attribute__((visibility("default")))

KERNEL_EXPORT extern const kernel_field kernels_fields[];

// Return the features of this processor that the operating system permits.
KERNEL_EXPORT int64_t kernels_features(void);
// Return the best kernel set that needs no feature besides these.
KERNEL_EXPORT const kernel_set *kernels_for(int64_t features);

// Return a kernel_status; the first fault found.
KERNEL_EXPORT int64_t kernels_check_attention(const attention_call *call);
KERNEL_EXPORT int64_t kernels_check_norm(const norm_call *call);
KERNEL_EXPORT int64_t kernels_check_rope(const rope_call *call);
KERNEL_EXPORT int64_t kernels_check_product(const product_call *call);
KERNEL_EXPORT int64_t kernels_check_token_layers(const token_layers_call *call);
KERNEL_EXPORT int64_t kernels_check_weight_layers(const weight_layers_call *call);
KERNEL_EXPORT int64_t kernels_check_logprobs(const logprobs_call *call);
KERNEL_EXPORT int64_t kernels_check_delta(const delta_call *call);

#endif
