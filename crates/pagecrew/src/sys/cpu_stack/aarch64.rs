//! As on x86-64. The bound is read with acquire ordering, so that the length is no older than it.

macro_rules! sequence {
    ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
        std::arch::asm!(
            ".pushsection __rseq_cs,\"aw\",@progbits",
            ".balign 32",
            "66: .long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            ".popsection",
            "2: adrp {scratch:x}, 66b",
            "add {scratch:x}, {scratch:x}, :lo12:66b",
            "str {scratch:x}, [{area}, 8]",
            "3: ldr {stack:w}, [{area}, 4]",
            "cmp {stack:w}, {cpus:w}",
            "b.hs 6f",
            "add {stack}, {base}, {stack}, lsl {stride}",
            "add {scratch:x}, {stack}, {bound}",
            "ldar {scratch:w}, [{scratch:x}]",
            "ldr {length:w}, [{stack}, {at}]",
            $operation!(whole),
            "str {length:w}, [{stack}, {at}]",
            "4: b 7f",
            ".inst 0xd428bc00",
            "5: b 2b",
            $operation!(none),
            "7:",
            $($operands)*
            area = in(reg) crate::sys::rseq::at($stacks.rseq),
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
        )
    };
}

macro_rules! pop {
    (whole) => {
        concat!(
            "cmp {length:w}, {scratch:w}\n",
            "b.ls 6f\n",
            "sub {length:w}, {length:w}, 1\n",
            "add {scratch:x}, {stack}, {length:x}, lsl 2\n",
            "ldr {scratch:w}, [{scratch:x}, {first}]",
        )
    };
    (none) => {
        "6: mov {scratch:w}, -1"
    };
}

macro_rules! push {
    (whole) => {
        concat!(
            "cmp {length:w}, {scratch:w}\n",
            "b.hs 6f\n",
            "add {scratch:x}, {stack}, {length:x}, lsl 2\n",
            "str {number:w}, [{scratch:x}, {first}]\n",
            "add {length:w}, {length:w}, 1",
        )
    };
    (none) => {
        "6: mov {length:w}, wzr"
    };
}

macro_rules! pop_many {
    (whole) => {
        concat!(
            "cmp {length:w}, {scratch:w}\n",
            "b.ls 6f\n",
            "mov {count:w}, {length:w}\n",
            "cmp {count}, {wanted}\n",
            "csel {count}, {count}, {wanted}, lo\n",
            "cbz {count}, 6f\n",
            "sub {length:w}, {length:w}, {count:w}\n",
            "add {from}, {stack}, {length:x}, lsl 2\n",
            "add {from}, {from}, {first}\n",
            copy!(),
        )
    };
    (none) => {
        "6: mov {count}, xzr"
    };
}

macro_rules! push_many {
    (whole) => {
        concat!(
            "subs {count:w}, {scratch:w}, {length:w}\n",
            "b.ls 6f\n",
            "cmp {count}, {wanted}\n",
            "csel {count}, {count}, {wanted}, lo\n",
            "cbz {count}, 6f\n",
            "add {to}, {stack}, {length:x}, lsl 2\n",
            "add {to}, {to}, {first}\n",
            "add {length:w}, {length:w}, {count:w}\n",
            copy!(),
        )
    };
    (none) => {
        "6: mov {count}, xzr"
    };
}

macro_rules! copy {
    () => {
        concat!(
            "mov {done:w}, wzr\n",
            "8: ldr {scratch:w}, [{from}, {done:w}, uxtw 2]\n",
            "str {scratch:w}, [{to}, {done:w}, uxtw 2]\n",
            "add {done:w}, {done:w}, 1\n",
            "cmp {done:w}, {count:w}\n",
            "b.ne 8b",
        )
    };
}

pub(super) use {copy, copying, pop, pop_many, push, push_many, sequence};
