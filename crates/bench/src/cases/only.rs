//! Which cases of a bench are wanted.

/// Texts that a case's name has to contain, all of them.
#[derive(Debug, Clone, Default)]
pub struct Only(Vec<String>);

impl Only {
    /// Capital letters are as good as small ones.
    pub fn new(texts: &[String]) -> Only {
        Only(texts.iter().map(|text| text.to_lowercase()).collect())
    }

    /// Whether the case of this name is wanted.
    pub fn wants(&self, case: &str) -> bool {
        let case = case.to_lowercase();
        self.0.iter().all(|text| case.contains(text))
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
        assert!(!only(&["cells", "two bytes"]).wants(case));
    }
}
