// Take it away: files and lines of a schedule.

export function openTake() {}
