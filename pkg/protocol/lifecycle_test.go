package protocol

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestOverdue(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	endsAt := func(at time.Time) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: at}}}
	}
	for name, test := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"not being deleted":                   {&corev1.Pod{}, false},
		"within its grace period":             {endsAt(now.Add(time.Hour)), false},
		"its grace period has just ended":     {endsAt(now.Add(-OverdueMargin)), false},
		"its grace period is long over":       {endsAt(now.Add(-OverdueMargin - time.Second)), true},
		"it was deleted without grace period": {endsAt(now), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Overdue(test.pod, now); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}
