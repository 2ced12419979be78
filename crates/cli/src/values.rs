//! Values that several commands take, on the command line and in files of settings.

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use std::collections::BTreeSet;
use std::ffi::CString;

/// A share of one CPU, out of a percentage.
pub fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim_end().parse::<f64>();
    match number {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent / 100.0),
        _ => Err(format!("'{text}' is not a percentage above 0 and up to 100")),
    }
}

/// A user's number, out of a name or a number.
pub fn parse_user(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(format!("there is no user '{text}'")),
        Err(error) => Err(format!("the user '{text}' can't be looked up: {error}")),
    }
}

/// A group's number, out of a name or a number.
pub fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(format!("there is no group '{text}'")),
        Err(error) => Err(format!("the group '{text}' can't be looked up: {error}")),
    }
}

/// The members of a group, by their numbers: those that the group names, and those whose first group it is.
pub fn members_of(group: u32) -> Result<BTreeSet<u32>, String> {
    let found = Group::from_gid(Gid::from_raw(group));
    let named = found.map_err(|error| format!("the group {group} can't be looked up: {error}"))?;
    let named = named.map(|group| group.mem).unwrap_or_default();
    let mut members: BTreeSet<u32> = named.iter().filter_map(|name| parse_user(name).ok()).collect();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    members.extend(first_members(&users, group));
    Ok(members)
}

/// A control group, by its name or its directory.
pub fn parse_control_group(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("a name is empty".into()) } else { Ok(text.to_owned()) }
}

/// The groups of a user, by their numbers, wherever the system's login looks for them; none where that can't be said.
pub fn groups_of(user: u32) -> Vec<u32> {
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(user)) else { return Vec::new() };
    let Ok(name) = CString::new(user.name) else { return Vec::new() };
    getgrouplist(&name, user.gid).unwrap_or_default().into_iter().map(Gid::as_raw).collect()
}

/// The users in the text of a file of users whose first group it is.
fn first_members(users: &str, group: u32) -> impl Iterator<Item = u32> + '_ {
    users.lines().filter_map(move |line| {
        let mut fields = line.split(':').skip(2);
        let user = fields.next()?.parse().ok()?;
        (fields.next()?.parse() == Ok(group)).then_some(user)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages() {
        assert_eq!(parse_percent("1"), Ok(0.01));
        assert_eq!(parse_percent(" 2.5 %"), Ok(0.025));
        assert!(parse_percent("nan").is_err() && parse_percent("-1").is_err() && parse_percent("").is_err());
    }

    #[test]
    fn members_of_groups() {
        let text = "root:x:0:0:root:/root:/bin/bash\na:x:5:36::/:/bin/sh\nb:x:6:37::\nodd\nc:x:7:36:::\n";
        assert_eq!(first_members(text, 36).collect::<Vec<_>>(), [5, 7]);
        assert!(members_of(0).unwrap().contains(&0));
        assert!(members_of(3_999_999_999).unwrap().is_empty());
        assert!(groups_of(0).contains(&0) && groups_of(3_999_999_999).is_empty());
    }

    #[test]
    fn users_and_groups_by_name_and_number() {
        assert_eq!((parse_user("root"), parse_user("4711")), (Ok(0), Ok(4711)));
        assert_eq!((parse_group("root"), parse_group("4711")), (Ok(0), Ok(4711)));
        assert!(parse_user("no such user").unwrap_err().contains("no such user"));
        assert!(parse_group("no such group").unwrap_err().contains("no such group"));
    }
}
