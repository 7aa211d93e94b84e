# What every kernel becomes on the mock device: an entry point that takes the address of one word and
# returns. The word, and the relocations for its address, are there because ttnn packs an image
# out of a kernel's data segment and its relocations, and refuses one that has none.

    .section .start, "ax"
    .globl _start
_start:
    lui     t0, %hi(kernel_word)
    lw      t1, %lo(kernel_word)(t0)
    ret

    .text
    .globl main
main:
    lui     t0, %hi(kernel_word)
    lw      t1, %lo(kernel_word)(t0)
    ret

    .data
    .globl kernel_word
kernel_word:
    .word   1
