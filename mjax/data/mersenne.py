"""The 64-bit Mersenne Twister of the C++ standard library, which NumPy has only in 32 bits.

Words follow the recurrence

    x[k + 312] = x[k + 156] ⊕ A(upper 33 bits of x[k], lower 31 bits of x[k + 1])

and are given out tempered. A word depends on none of the 155 before it, so 156 at a time are one operation on arrays.

Source: Matsumoto and Nishimura, mt19937-64.c (2004); C++11, 26.5.3.2, whose 26.5.5 names the 10,000th word.
"""

import numpy as np

STATE, LAG = 312, 156  # words the recurrence looks back, and words it computes at once
LOWER = 2**31 - 1
UPPER = 2**64 - 1 - LOWER
TWIST = 0xB5026F5AA96619E9


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """The first `count` words of `std::mt19937_64(seed)`, uint64 [count]."""
    words = np.empty(STATE + count, np.uint64)
    word = seed % 2**64
    for i in range(STATE):
        words[i] = word
        word = (6364136223846793005 * (word ^ (word >> 62)) + i + 1) % 2**64
    for first in range(STATE, len(words), LAG):
        new = words[first : first + LAG]
        before, after = words[first - STATE :][: len(new)], words[first - STATE + 1 :][: len(new)]
        np.bitwise_xor(((before & UPPER) | (after & LOWER)) >> 1, (after & 1) * TWIST, out=new)
        new ^= words[first - LAG :][: len(new)]
    tempered = words[STATE:]
    tempered ^= (tempered >> 29) & 0x5555555555555555
    tempered ^= (tempered << 17) & 0x71D67FFFEDA60000
    tempered ^= (tempered << 37) & 0xFFF7EEE000000000
    tempered ^= tempered >> 43
    return tempered
