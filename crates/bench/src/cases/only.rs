//! Which cases of a bench are wanted.

use std::cell::Cell;

/// Texts that a case's name has to contain, all of them.
#[derive(Debug, Default)]
pub struct Only {
    texts: Vec<String>,
    matched: Cell<bool>,
}

impl Only {
    /// Capital letters are as good as small ones.
    pub fn new(texts: &[String]) -> Only {
        Only { texts: texts.iter().map(|text| text.to_lowercase()).collect(), matched: Cell::new(false) }
    }

    /// Whether the case of this name is wanted.
    pub fn wants(&self, case: &str) -> bool {
        let case = case.to_lowercase();
        let wanted = self.texts.iter().all(|text| case.contains(text));
        self.matched.set(self.matched.get() || wanted);
        wanted
    }

    /// Whether no case was wanted so far.
    pub fn matched_nothing(&self) -> bool {
        !self.matched.get()
    }

    /// Whether one of the texts is part of `name`, which is the distinguishing part of a case's name.
    pub fn asks_for(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        self.texts.iter().any(|text| name.contains(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_to_be_there() {
        let case = "cells: 64 KiB, whole, 1 thread, 16 slots";
        let only = |texts: &[&str]| Only::new(&texts.iter().map(|text| text.to_string()).collect::<Vec<_>>());
        assert!(only(&[]).wants(case));
        assert!(only(&["cells"]).wants(case) && only(&["CELLS", "64 kib", "whole"]).wants(case));
        let two_bytes = only(&["cells", "two bytes"]);
        assert!(!two_bytes.wants(case) && two_bytes.matched_nothing());
        assert!(two_bytes.wants("cells: two bytes") && !two_bytes.matched_nothing());
        assert!(only(&["programs", "git"]).asks_for("git gc") && !only(&["programs"]).asks_for("git gc"));
    }
}
