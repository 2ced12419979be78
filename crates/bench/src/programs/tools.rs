//! Programs that take files apart and put others together.

use super::job::{Job, installed};
use super::{Run, data};
use crate::report::Report;
use anyhow::{Result, ensure};
use std::fs::File;
use std::process::Command;

pub fn image_magick(report: &Report) -> Result<Option<Run>> {
    // `convert` may be somebody else's.
    let programs = ["magick", "convert-im6.q16", "convert-im6"];
    let Some(convert) = installed(&programs, "ImageMagick", "imagemagick", report) else { return Ok(None) };
    let effects = ["-blur", "0x3", "-resize", "70%", "-rotate", "30", "rgb:picture"];
    let job = Job::new()?.command(&[convert, "-seed", "1", "-size", "1400x1400", "plasma:fractal"]).command(&effects);
    Ok(Some(job.compare_file("picture").ready()))
}

pub fn ffmpeg(report: &Report) -> Result<Option<Run>> {
    let Some(ffmpeg) = installed(&["ffmpeg"], "ffmpeg", "ffmpeg", report) else { return Ok(None) };
    let source = "testsrc2=size=1280x720:rate=25:duration=12";
    let job = Job::new()?.command(&[ffmpeg, "-v", "error", "-nostdin", "-f", "lavfi", "-i", source]);
    let job = job.command(&["-vf", "scale=960:540,hflip", "-c:v", "mpeg4", "-threads", "2", "-f", "md5", "-"]);
    Ok(Some(job.ready()))
}

pub fn sort(report: &Report) -> Result<Option<Run>> {
    let Some(sort) = installed(&["sort"], "sort", "coreutils", report) else { return Ok(None) };
    let job = Job::new()?;
    data::lines(&mut File::create(job.directory().join("text"))?, 1_000_000)?;
    let job = job.command(&[sort, "--parallel=2", "-S", "256M", "-o", "sorted", "text"]);
    Ok(Some(job.compare_file("sorted").ready()))
}

pub fn compiler(report: &Report) -> Result<Option<Run>> {
    let Some(compiler) = installed(&["g++"], "g++", "g++", report) else { return Ok(None) };
    let job = Job::new()?.file("templates.cpp", include_str!("../../scripts/programs/templates.cpp"))?;
    let job = job.command(&[compiler, "-O1", "-std=c++17", "-S", "-o", "code", "templates.cpp"]);
    Ok(Some(job.compare_file("code").ready()))
}

pub fn sqlite(report: &Report) -> Result<Option<Run>> {
    let Some(sqlite) = installed(&["sqlite3"], "SQLite", "sqlite3", report) else { return Ok(None) };
    let job = Job::new()?.file("table.sql", include_str!("../../scripts/programs/table.sql"))?;
    Ok(Some(job.command(&[sqlite, "-batch", ":memory:", ".read table.sql"]).ready()))
}

/// The same work every time, since all deltas are computed anew. Which ones it finds depends on its threads, so what is compared
/// are the objects.
pub fn git(report: &Report) -> Result<Option<Run>> {
    let Some(git) = installed(&["git"], "git", "git", report) else { return Ok(None) };
    let job = Job::new()?.variable("GIT_CONFIG_GLOBAL", "/dev/null").variable("GIT_CONFIG_NOSYSTEM", "1");
    let in_it = |arguments: &[&str]| {
        let mut command = Command::new(git);
        command.args(arguments).current_dir(job.directory());
        command.envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")]);
        command
    };
    let made = in_it(&["init", "--quiet", "--bare", "."]).status()?;
    ensure!(made.success(), "git init failed: {made}");
    data::history(&mut File::create(job.directory().join("history"))?)?;
    let filled = in_it(&["fast-import", "--quiet"]).stdin(File::open(job.directory().join("history"))?).status()?;
    ensure!(filled.success(), "git fast-import failed: {filled}");
    std::fs::remove_file(job.directory().join("history"))?;
    let job = job.command(&[git, "-c", "pack.threads=2", "gc", "--aggressive", "--prune=now", "--quiet"]);
    Ok(Some(job.check_by(&["git", "rev-list", "--all", "--objects"]).ready()))
}
