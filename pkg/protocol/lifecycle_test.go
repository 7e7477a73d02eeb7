package protocol

import (
	"testing"
	"time"
)

func TestLeavesBy(t *testing.T) {
	deletion := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		grace int64
		want  time.Duration // Since the request.
	}{
		"at once":     {0, 0},
		"ten minutes": {600, 10 * time.Minute},
		"a day":       {86400, 10 * time.Minute},
	} {
		expect(t, name, tc.want, LeavesBy(deletion, tc.grace).Sub(deletion.Add(-time.Duration(tc.grace)*time.Second)))
	}
}

func TestOverdue(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		since time.Duration // Since the end of the grace period.
		want  bool
	}{
		"within its grace period":         {-time.Hour, false},
		"deleted without a grace period":  {0, false},
		"its grace period has just ended": {OverdueMargin, false},
		"its grace period ended long ago": {OverdueMargin + time.Second, true},
	} {
		expect(t, name, tc.want, Overdue(now.Add(-tc.since), now))
	}
}
