//! Frames on the nodes that were asked for, page by page, as the kernel says (`move_pages`). On a machine with one node, and where the
//! kernel does not say it, there is little to see.

use pagecrew::frame::{Frames, Options};
use pagecrew::region::{self, Region};
use pagecrew::sys::memory::Range;
use pagecrew::sys::sched::{self, CpuSet};
use pagecrew::sys::topology::{Topology, possible_cpus};
use pagecrew::sys::{PAGE_SIZE, numa};
use std::sync::Arc;

const MIB: usize = 1 << 20;

/// Whether the calling thread is on `cpu` from now on.
fn go_to(cpu: usize) -> bool {
    let mut one = CpuSet::new();
    one.insert(cpu);
    sched::set_affinity(&one).is_ok()
}

fn build(limit: usize) -> Frames {
    let region = Arc::new(Region::new(region::Options::default()).unwrap());
    Frames::new(region, Options { limit, ..Options::default() }).unwrap()
}

/// Touches frames and says on which node of the kernel's numbers they are; `None` where the kernel does not say it.
fn nodes_of(frames: &Frames, numbers: &[u32]) -> Option<Vec<usize>> {
    let mut nodes = Vec::new();
    for &number in numbers {
        let address = frames.address(number);
        // SAFETY: the frame is this test's own.
        unsafe { address.write(1) };
        let page = Range { start: address.as_ptr() as usize, len: PAGE_SIZE };
        nodes.extend(numa::placement(page, PAGE_SIZE).ok()?.nodes().map(|(node, _)| node));
    }
    Some(nodes)
}

fn free(frames: &Frames, numbers: &[u32]) {
    // SAFETY: the frames are this test's own, and it does not use them any more.
    unsafe { frames.free_bulk(numbers).unwrap() };
}

#[test]
fn frames_are_on_the_node_of_the_cpu_that_asks() {
    let topology = Topology::read();
    let frames = build(256 * MIB);
    assert_eq!(frames.zones(), topology.nodes());
    let cpus: Vec<usize> = (0..possible_cpus()).filter(|&cpu| topology.node_of(cpu).is_some()).collect();
    // The second time, all frames were somebody's before, on whatever CPU.
    for round in 0..2 {
        for &cpu in cpus.iter().filter(|&&cpu| go_to(cpu)) {
            let expected = topology.number(topology.node_of(cpu).unwrap());
            let mut numbers = vec![0; 3000];
            assert_eq!(frames.alloc_bulk(&mut numbers), numbers.len());
            numbers.extend((0..500).map(|_| frames.alloc().unwrap()));
            numbers.extend((0..500).map(|_| frames.alloc_zeroed().unwrap()));
            let Some(nodes) = nodes_of(&frames, &numbers) else { return };
            assert_eq!(nodes.len(), numbers.len());
            let elsewhere = nodes.iter().filter(|&&node| node != expected).count();
            assert_eq!(elsewhere, 0, "of {} frames of CPU {cpu} in round {round}", nodes.len());
            // Freed on another CPU they go home, and come back from there.
            let other = cpus[(cpus.iter().position(|&one| one == cpu).unwrap() + cpus.len() / 2) % cpus.len()];
            go_to(other);
            free(&frames, &numbers);
        }
        frames.drain();
    }
}

#[test]
fn a_zone_that_is_empty_is_helped_out_by_the_nearest() {
    let topology = Topology::read();
    let frames = build(topology.nodes() * 64 * MIB);
    let Some(cpu) = (0..possible_cpus()).find(|&cpu| topology.node_of(cpu).is_some() && go_to(cpu)) else { return };
    let order = topology.nearest(topology.node_of(cpu).unwrap()).to_vec();
    let each = frames.zone_stats(0).limit;
    for (step, &node) in order.iter().enumerate() {
        let mut numbers = vec![0; each];
        // Whole zones, by way of no stack.
        assert_eq!(frames.alloc_bulk(&mut numbers), each, "zone {step}");
        let some: Vec<u32> = numbers.iter().copied().step_by(each / 64).collect();
        let Some(nodes) = nodes_of(&frames, &some) else { return };
        let here = nodes.iter().filter(|&&number| number == topology.number(node)).count();
        // A stack holds a few.
        assert!(here * 10 >= nodes.len() * 9, "{here} of {} on node {}", nodes.len(), topology.number(node));
    }
    assert!(frames.alloc().is_err());
}

#[test]
fn frames_that_are_dropped_leave_a_region_as_it_was() {
    let topology = Topology::read();
    let region = Arc::new(Region::new(region::Options::default()).unwrap());
    for _ in 0..3 {
        let options = Options { limit: topology.nodes() * 64 * MIB, ..Options::default() };
        let frames = Frames::new(region.clone(), options).unwrap();
        let mut numbers = vec![0; topology.nodes() * 64 * MIB / PAGE_SIZE];
        assert_eq!(frames.alloc_bulk(&mut numbers), numbers.len());
        nodes_of(&frames, &numbers);
        drop(frames);
    }
    for cpu in (0..possible_cpus()).filter(|&cpu| topology.node_of(cpu).is_some()) {
        if !go_to(cpu) {
            continue;
        }
        let spans: Vec<_> = (0..8).map(|_| region.allocate(32 * MIB, 1).unwrap()).collect();
        for span in spans {
            let range = Range { start: span.as_ptr() as usize, len: 32 * MIB };
            for page in (0..range.len).step_by(PAGE_SIZE) {
                // SAFETY: the span is this test's own.
                unsafe { span.add(page).write(1) };
            }
            if let Ok(placement) = numa::placement(range, PAGE_SIZE) {
                let node = topology.number(topology.node_of(cpu).unwrap());
                assert_eq!(placement.elsewhere(node), 0, "{placement:?} on CPU {cpu}");
            }
            // SAFETY: nobody uses the span any more.
            unsafe { region.free(span).unwrap() };
        }
    }
}
