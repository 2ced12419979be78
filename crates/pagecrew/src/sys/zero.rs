//! Zeroing memory with each method that a CPU may have, and zeroing that another thread can stop at any instant.
//!
//! **Revocable zeroing.** A helper of the idle scheduling class may be preempted in the middle of a range and not run again for
//! a long time, while somebody waits for that range. Because zeroing is done in a restartable sequence, the waiter can take
//! the range back instead: it sets the revocation flag and calls [`membarrier::restart_sequences`](super::membarrier). From
//! then on the helper writes not a single byte: the kernel makes a thread that was preempted (or interrupted by that call) go on
//! at the abort handler, which reads the flag before it goes on. The position is one register, so whatever the instant, the
//! helper goes on exactly where it was when the flag is not set.

use super::PAGE_SIZE;
use super::memory::Range;
use super::rseq;
use std::sync::atomic::AtomicU32;

/// A way to write zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// `rep stosb` on x86-64, plain store pairs on aarch64: leaves what it wrote in the cache.
    Cached,
    /// 16-byte non-temporal stores (SSE2).
    Stream128,
    /// 32-byte non-temporal stores (AVX).
    Stream256,
    /// 64-byte non-temporal stores (AVX-512F).
    Stream512,
    /// `CLZERO`, a cache line at a time (AMD, Zen and later).
    LineZero,
    /// `DC ZVA`, a block at a time (aarch64).
    BlockZero,
}

impl Method {
    /// Every method, each at the place of its number.
    pub const EVERY: [Method; 6] =
        [Method::Cached, Method::Stream128, Method::Stream256, Method::Stream512, Method::LineZero, Method::BlockZero];

    /// Whether this CPU has the method.
    pub fn available(self) -> bool {
        arch::available(self)
    }

    /// The methods that this CPU has.
    pub fn all() -> impl Iterator<Item = Method> {
        Method::EVERY.into_iter().filter(|method| method.available())
    }
}

/// Zeroes `range`, whose bounds are page aligned.
///
/// # Safety
/// The range is mapped read-write and nobody else uses it, and this CPU has the `method`.
pub unsafe fn zero(range: Range, method: Method) {
    debug_assert!(range.start.is_multiple_of(PAGE_SIZE) && range.len.is_multiple_of(PAGE_SIZE));
    if range.len > 0 {
        // SAFETY: by the function's own contract.
        unsafe { arch::zero(range.start, range.len, method) }
    }
}

/// Zeroes `range` until `revoked` is not 0. Returns whether all of it was zeroed: never where this thread isn't [`revocable`].
///
/// # Safety
/// As [`zero`], for as long as `revoked` is 0 and, after it is set, until [`super::membarrier::restart_sequences`] has returned.
pub unsafe fn zero_unless(range: Range, method: Method, revoked: &AtomicU32) -> bool {
    debug_assert!(range.start.is_multiple_of(PAGE_SIZE) && range.len.is_multiple_of(PAGE_SIZE));
    match rseq::area() {
        // SAFETY: by the function's own contract; the area is this thread's.
        Some(area) => unsafe { range.len == 0 || arch::zero_revocable(range.start, range.len, method, area, revoked) },
        None => range.len == 0,
    }
}

/// Whether this thread can run [`zero_unless`]: [`rseq::prepare`] has found a registered area.
pub fn revocable() -> bool {
    rseq::area().is_some()
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::{Method, rseq};
    use std::arch::asm;
    use std::ffi::c_void;
    use std::sync::atomic::AtomicU32;

    pub fn available(method: Method) -> bool {
        match method {
            Method::Cached | Method::Stream128 => true,
            Method::Stream256 => std::arch::is_x86_feature_detected!("avx"),
            Method::Stream512 => std::arch::is_x86_feature_detected!("avx512f"),
            Method::LineZero => {
                let extended = std::arch::x86_64::__cpuid(0x8000_0000).eax;
                extended >= 0x8000_0008 && std::arch::x86_64::__cpuid(0x8000_0008).ebx & 1 == 1
            }
            Method::BlockZero => false,
        }
    }

    /// The loops below walk `index` from minus the length up to 0, with `end` fixed: one register is the whole position.
    macro_rules! loop_body {
        (stosb) => {
            "rep stosb"
        };
        (stream128) => {
            "76: movntdq [{end} + {index}], xmm0
                 movntdq [{end} + {index} + 16], xmm0
                 movntdq [{end} + {index} + 32], xmm0
                 movntdq [{end} + {index} + 48], xmm0
                 add {index}, 64
                 jnz 76b"
        };
        (stream256) => {
            "76: vmovntdq [{end} + {index}], ymm0
                 vmovntdq [{end} + {index} + 32], ymm0
                 vmovntdq [{end} + {index} + 64], ymm0
                 vmovntdq [{end} + {index} + 96], ymm0
                 add {index}, 128
                 jnz 76b"
        };
        (stream512) => {
            "76: vmovntdq [{end} + {index}], zmm0
                 vmovntdq [{end} + {index} + 64], zmm0
                 vmovntdq [{end} + {index} + 128], zmm0
                 vmovntdq [{end} + {index} + 192], zmm0
                 add {index}, 256
                 jnz 76b"
        };
        (line_zero) => {
            "76: lea rax, [{end} + {index}]
                 clzero
                 add {index}, 64
                 jnz 76b"
        };
    }

    /// Clears the widest register that the stores use. An abort keeps the registers, so once is enough.
    macro_rules! clear {
        (stosb) => {
            "xor eax, eax"
        };
        (stream128) => {
            "pxor xmm0, xmm0"
        };
        (stream256) => {
            "vpxor xmm0, xmm0, xmm0"
        };
        (stream512) => {
            "vpxor xmm0, xmm0, xmm0"
        };
        (line_zero) => {
            ""
        };
    }

    /// Ends the stores: non-temporal ones become visible, the upper halves of vector registers are clean again.
    macro_rules! settle {
        (stosb) => {
            ""
        };
        (stream128) => {
            "sfence"
        };
        (stream256) => {
            "vzeroupper
             sfence"
        };
        (stream512) => {
            "vzeroupper
             sfence"
        };
        (line_zero) => {
            "sfence"
        };
    }

    /// `vzeroupper` changes the upper halves of ymm0 to ymm15. Naming xmm0 to xmm15 clobbers the wide registers that they are part of.
    macro_rules! plain {
        (stosb, $start:expr, $len:expr) => {
            asm!("rep stosb", inout("rdi") $start => _, inout("rcx") $len => _, in("al") 0u8, options(nostack, preserves_flags))
        };
        ($kind:ident, $start:expr, $len:expr) => {
            asm!(
                clear!($kind),
                loop_body!($kind),
                settle!($kind),
                end = in(reg) $start + $len,
                index = inout(reg) -($len as isize) => _,
                out("rax") _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack)
            )
        };
    }

    /// The sequence: arm (70), enter (71), read the flag, write, leave (72). The descriptor (77) tells the kernel where the
    /// sequence begins, how long it is, and that a thread it interrupted goes on at 74, which arms it again. The four bytes
    /// before 74 are the signature that glibc registered for x86-64, inside an undefined instruction.
    macro_rules! sequence {
        ($clear:expr, $more:expr, $body:expr, $settle:expr) => {
            concat!(
                ".pushsection __rseq_cs, \"aw\"\n.balign 32\n77: .long 0, 0\n.quad 71f, 72f - 71f, 74f\n.popsection\n",
                $clear,
                "\n70: lea {scratch}, [rip + 77b]\n mov [{sequence}], {scratch}\n",
                "71: cmp dword ptr [{revoked}], 0\n jne 72f\n",
                $more,
                "\n jz 72f\n",
                $body,
                "\n72: mov qword ptr [{sequence}], 0\n jmp 75f\n",
                ".byte 0x0f, 0xb9, 0x3d\n.long 0x53053053\n74: jmp 70b\n75:\n",
                $settle
            )
        };
    }

    macro_rules! revocable {
        ($kind:ident, $start:expr, $len:expr, $area:expr, $revoked:expr) => {{
            let mut index = -($len as isize);
            asm!(
                sequence!(clear!($kind), "test {index}, {index}", loop_body!($kind), settle!($kind)),
                scratch = out(reg) _,
                sequence = in(reg) $area,
                revoked = in(reg) $revoked,
                end = in(reg) $start + $len,
                index = inout(reg) index,
                out("rax") _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack)
            );
            index == 0
        }};
    }

    /// # Safety
    /// As [`super::zero`]; the method is available.
    pub unsafe fn zero(start: usize, len: usize, method: Method) {
        // SAFETY: each loop writes exactly [start, start + len), which the caller owns.
        unsafe {
            match method {
                Method::Stream128 => plain!(stream128, start, len),
                Method::Stream256 => plain!(stream256, start, len),
                Method::Stream512 => plain!(stream512, start, len),
                Method::LineZero => plain!(line_zero, start, len),
                Method::Cached | Method::BlockZero => plain!(stosb, start, len),
            }
        }
    }

    /// # Safety
    /// As [`super::zero_unless`]; the method is available; `area` is the calling thread's registered area.
    pub unsafe fn zero_revocable(
        start: usize,
        len: usize,
        method: Method,
        area: *mut c_void,
        revoked: &AtomicU32,
    ) -> bool {
        let field = area.wrapping_byte_add(rseq::CRITICAL_SECTION);
        let revoked = revoked.as_ptr();
        // SAFETY: each loop writes only within [start, start + len), and only between reading a flag of 0 and the next
        // preemption; `field` is the thread's own `rseq_cs`, which the kernel and this code alone use at this time.
        unsafe {
            match method {
                Method::Stream128 => revocable!(stream128, start, len, field, revoked),
                Method::Stream256 => revocable!(stream256, start, len, field, revoked),
                Method::Stream512 => revocable!(stream512, start, len, field, revoked),
                Method::LineZero => revocable!(line_zero, start, len, field, revoked),
                Method::Cached | Method::BlockZero => {
                    let mut left = len;
                    asm!(
                        sequence!(clear!(stosb), "test rcx, rcx", loop_body!(stosb), settle!(stosb)),
                        scratch = out(reg) _,
                        sequence = in(reg) field,
                        revoked = in(reg) revoked,
                        inout("rdi") start => _,
                        inout("rcx") left,
                        out("rax") _,
                        options(nostack)
                    );
                    left == 0
                }
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use super::{Method, rseq};
    use std::arch::asm;
    use std::ffi::c_void;
    use std::sync::atomic::AtomicU32;

    /// Bytes that one `DC ZVA` zeroes; `None` where it is prohibited.
    fn block() -> Option<usize> {
        let dczid: u64;
        // SAFETY: DCZID_EL0 is readable from user mode.
        unsafe { asm!("mrs {}, dczid_el0", out(reg) dczid, options(nomem, nostack, preserves_flags)) };
        (dczid & 16 == 0).then(|| 4usize << (dczid & 15)).filter(|&bytes| bytes <= super::PAGE_SIZE)
    }

    pub fn available(method: Method) -> bool {
        match method {
            Method::Cached => true,
            Method::BlockZero => block().is_some(),
            _ => false,
        }
    }

    /// The step and the instruction that clears a step's worth of memory at `{place}`.
    macro_rules! clear_step {
        (pairs) => {
            "stp xzr, xzr, [{place}]
             stp xzr, xzr, [{place}, #16]
             stp xzr, xzr, [{place}, #32]
             stp xzr, xzr, [{place}, #48]"
        };
        (block) => {
            "dc zva, {place}"
        };
    }

    macro_rules! plain {
        ($kind:ident, $start:expr, $len:expr, $step:expr) => {
            asm!(
                "76: add {place}, {end}, {index}",
                clear_step!($kind),
                "adds {index}, {index}, {step}
                 b.ne 76b",
                place = out(reg) _,
                end = in(reg) $start + $len,
                index = inout(reg) -($len as isize) => _,
                step = in(reg) $step,
                options(nostack)
            )
        };
    }

    /// As on x86-64: arm (70), enter (71), read the flag, write, leave (72); an interrupted thread goes on at 74.
    macro_rules! revocable {
        ($kind:ident, $start:expr, $len:expr, $step:expr, $field:expr, $revoked:expr) => {{
            let mut index = -($len as isize);
            asm!(
                ".pushsection __rseq_cs, \"aw\"
                 .balign 32
                 77: .long 0, 0
                 .quad 71f, 72f - 71f, 74f
                 .popsection
                 70: adrp {place}, 77b
                 add {place}, {place}, :lo12:77b
                 str {place}, [{field}]
                 71: ldr {place:w}, [{revoked}]
                 cbnz {place:w}, 72f
                 cbz {index}, 72f
                 76: add {place}, {end}, {index}",
                clear_step!($kind),
                "adds {index}, {index}, {step}
                 b.ne 76b
                 72: str xzr, [{field}]
                 b 75f
                 .inst 0xd428bc00
                 74: b 70b
                 75:",
                place = out(reg) _,
                field = in(reg) $field,
                revoked = in(reg) $revoked,
                end = in(reg) $start + $len,
                index = inout(reg) index,
                step = in(reg) $step,
                options(nostack)
            );
            index == 0
        }};
    }

    /// # Safety
    /// As [`super::zero`]; the method is available.
    pub unsafe fn zero(start: usize, len: usize, method: Method) {
        // SAFETY: each loop writes exactly [start, start + len), which the caller owns.
        unsafe {
            match (method, block()) {
                (Method::BlockZero, Some(step)) => plain!(block, start, len, step),
                _ => plain!(pairs, start, len, 64usize),
            }
        }
    }

    /// # Safety
    /// As [`super::zero_unless`]; the method is available; `area` is the calling thread's registered area.
    pub unsafe fn zero_revocable(
        start: usize,
        len: usize,
        method: Method,
        area: *mut c_void,
        revoked: &AtomicU32,
    ) -> bool {
        let field = area.wrapping_byte_add(rseq::CRITICAL_SECTION);
        let revoked = revoked.as_ptr();
        // SAFETY: as on x86-64: writes only within the range, and only between reading a flag of 0 and the next preemption.
        unsafe {
            match (method, block()) {
                (Method::BlockZero, Some(step)) => revocable!(block, start, len, step, field, revoked),
                _ => revocable!(pairs, start, len, 64usize, field, revoked),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};
    use crate::sys::stop_on_drop::StopOnDrop;
    use crate::sys::{membarrier, sched};
    use std::sync::atomic::{AtomicBool, Ordering};

    fn filled(len: usize) -> (Range, &'static mut [u8]) {
        let range = Range { start: map(len, Protection::ReadWrite).unwrap(), len };
        // SAFETY: a fresh read-write mapping that lives until the test unmaps it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, len) };
        bytes.fill(0xa5);
        (range, bytes)
    }

    #[test]
    fn every_method_writes_exactly_the_range() {
        let (range, bytes) = filled(6 * PAGE_SIZE);
        let inner = Range { start: range.start + PAGE_SIZE, len: 4 * PAGE_SIZE };
        let flag = AtomicU32::new(0);
        for method in Method::all() {
            for stoppable in [false, true] {
                bytes.fill(0xa5);
                // SAFETY: the range belongs to this test and the method is available.
                unsafe {
                    match (stoppable, rseq::prepare()) {
                        (true, Ok(())) => {
                            let area = rseq::area().unwrap();
                            assert!(arch::zero_revocable(inner.start, inner.len, method, area, &flag));
                        }
                        _ => arch::zero(inner.start, inner.len, method),
                    }
                }
                assert!(bytes[..PAGE_SIZE].iter().all(|&byte| byte == 0xa5), "{method:?}");
                assert!(bytes[PAGE_SIZE..5 * PAGE_SIZE].iter().all(|&byte| byte == 0), "{method:?}");
                assert!(bytes[5 * PAGE_SIZE..].iter().all(|&byte| byte == 0xa5), "{method:?}");
            }
        }
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }

    #[test]
    fn a_revoked_range_is_left_alone() {
        if rseq::prepare().is_err() {
            return;
        }
        let (range, bytes) = filled(PAGE_SIZE);
        let flag = AtomicU32::new(1);
        // SAFETY: the range belongs to this test.
        assert!(!unsafe { zero_unless(range, Method::Cached, &flag) });
        assert!(bytes.iter().all(|&byte| byte == 0xa5));
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }

    /// The promise that callers rely on: once the barrier has returned, not one more byte is written, wherever the zeroing
    /// thread was. Each round fills the range again right behind the barrier and looks for a zero later.
    #[test]
    fn nothing_is_written_behind_the_barrier() {
        if rseq::prepare().is_err() || membarrier::register().is_err() {
            return;
        }
        let (range, bytes) = filled(2 << 20);
        let (go, revoked, stop) = (AtomicBool::new(false), AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let running = StopOnDrop(&stop);
            scope.spawn(|| {
                let _ = sched::set_class(0, sched::Class::Idle);
                let (methods, mut turn): (Vec<_>, usize) = (Method::all().collect(), 0);
                while !stop.load(Ordering::Relaxed) {
                    if go.swap(false, Ordering::Acquire) {
                        let method = methods[turn % methods.len()];
                        turn += 1;
                        // SAFETY: the other thread writes to the range only after it has revoked it.
                        while unsafe { zero_unless(range, method, &revoked) } {}
                    }
                    std::hint::spin_loop();
                }
            });
            // The other may have to wait for a CPU until this thread sleeps: then a round takes long, and fewer have to do.
            let begin = std::time::Instant::now();
            for round in (0..2000u32).take_while(|round| *round < 100 || begin.elapsed().as_secs() < 10) {
                revoked.store(0, Ordering::SeqCst);
                go.store(true, Ordering::Release);
                for _ in 0..(round % 64) * 50 {
                    std::hint::spin_loop();
                }
                revoked.store(1, Ordering::SeqCst);
                membarrier::restart_sequences().unwrap();
                let mark = (round % 255) as u8 + 1;
                bytes[..1 << 16].fill(mark);
                for _ in 0..500 {
                    std::hint::spin_loop();
                }
                assert!(bytes[..1 << 16].iter().all(|&byte| byte == mark), "round {round}");
                // The zeroing thread must have seen the revocation before the next round takes it back.
                let asked = std::time::Instant::now();
                while go.load(Ordering::Relaxed) {
                    if asked.elapsed().as_millis() > 1 {
                        std::thread::sleep(std::time::Duration::from_micros(100));
                    }
                }
            }
            drop(running);
            revoked.store(1, Ordering::SeqCst);
        });
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }
}
