//! What the sequences are on x86-64. Each operation finds its bound in `{scratch}` and the length in `{length}`, leaves the new length
//! there, and says what is done where it jumps to label 6.

macro_rules! sequence {
    ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
        std::arch::asm!(
            ".pushsection __rseq_cs,\"aw\",@progbits",
            ".balign 32",
            "66: .long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            ".popsection",
            ".pushsection .text.unlikely,\"ax\",@progbits",
            ".long 0x53053053",
            "5: jmp 2f",
            ".popsection",
            "2: lea {scratch:r}, [rip + 66b]",
            "mov fs:[{rseq} + 8], {scratch:r}",
            "3: mov {stack:e}, fs:[{rseq} + 4]",
            "cmp {stack:e}, {cpus:e}",
            "jae 6f",
            "shl {stack}, {stride}",
            "add {stack}, {base}",
            "mov {scratch:e}, [{stack} + {bound}]",
            "mov {length:e}, [{stack} + {at}]",
            $operation!(whole),
            "mov [{stack} + {at}], {length:e}",
            "4:",
            ".pushsection .text.unlikely,\"ax\",@progbits",
            $operation!(none),
            "jmp 7f",
            ".popsection",
            "7:",
            $($operands)*
            rseq = in(reg) $stacks.rseq,
            cpus = in(reg) $stacks.cpus,
            base = in(reg) $stacks.base,
            stride = const STRIDE,
            bound = const $bound,
            at = const LENGTH,
            first = const FIRST,
            options(nostack)
        )
    };
}

macro_rules! copying {
    ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
        sequence!(
            $stacks,
            $bound,
            $operation,
            $($operands)*
            stack = out(reg) _,
            scratch = out(reg) _,
            length = out(reg) _,
            done = out(reg) _,
            four = out(xmm_reg) _,
        )
    };
}

macro_rules! pop {
    (whole) => {
        concat!(
            "cmp {length:e}, {scratch:e}\n",
            "jbe 6f\n",
            "mov {scratch:e}, [{stack} + 4*{length:r} + {first} - 4]\n",
            "dec {length:e}",
        )
    };
    (none) => {
        "6: mov {scratch:e}, -1"
    };
}

macro_rules! push {
    (whole) => {
        concat!(
            "cmp {length:e}, {scratch:e}\n",
            "jae 6f\n",
            "mov [{stack} + 4*{length:r} + {first}], {number:e}\n",
            "inc {length:e}",
        )
    };
    (none) => {
        "6: xor {length:e}, {length:e}"
    };
}

macro_rules! pop_many {
    (whole) => {
        concat!(
            "cmp {length:e}, {scratch:e}\n",
            "jbe 6f\n",
            "mov {count:e}, {length:e}\n",
            "cmp {count}, {wanted}\n",
            "cmova {count}, {wanted}\n",
            "sub {length:e}, {count:e}\n",
            "lea {from}, [{stack} + 4*{length:r} + {first}]\n",
            copy!(),
        )
    };
    (none) => {
        "6: xor {count:e}, {count:e}"
    };
}

macro_rules! push_many {
    (whole) => {
        concat!(
            "mov {count:e}, {scratch:e}\n",
            "sub {count:e}, {length:e}\n",
            "jbe 6f\n",
            "cmp {count}, {wanted}\n",
            "cmova {count}, {wanted}\n",
            "lea {to}, [{stack} + 4*{length:r} + {first}]\n",
            "add {length:e}, {count:e}\n",
            copy!(),
        )
    };
    (none) => {
        "6: xor {count:e}, {count:e}"
    };
}

/// Copies `{count}` numbers from `{from}` to `{to}`: odd ones first, then four at a time.
macro_rules! copy {
    () => {
        concat!(
            "xor {done:e}, {done:e}\n",
            "mov {scratch:e}, {count:e}\n",
            "and {scratch:e}, 3\n",
            "jz 9f\n",
            "8: movd {four}, dword ptr [{from} + 4*{done}]\n",
            "movd dword ptr [{to} + 4*{done}], {four}\n",
            "inc {done:e}\n",
            "cmp {done:e}, {scratch:e}\n",
            "jne 8b\n",
            "9: cmp {done:e}, {count:e}\n",
            "je 22f\n",
            "88: movups {four}, [{from} + 4*{done}]\n",
            "movups [{to} + 4*{done}], {four}\n",
            "add {done:e}, 4\n",
            "cmp {done:e}, {count:e}\n",
            "jne 88b\n",
            "22:",
        )
    };
}

pub(super) use {copy, copying, pop, pop_many, push, push_many, sequence};
