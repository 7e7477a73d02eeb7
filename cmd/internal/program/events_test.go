package program

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// sink keeps the messages of Events.
type sink struct{ messages []string }

func (s *sink) Create(event *corev1.Event) (*corev1.Event, error) {
	s.messages = append(s.messages, event.Message)
	return event, nil
}

func (s *sink) Update(event *corev1.Event) (*corev1.Event, error) { return s.Create(event) }

func (s *sink) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) { return event, nil }

func TestShortEvents(t *testing.T) {
	kept := new(sink)
	events := ShortEvents(kept)
	long := &corev1.Event{Message: strings.Repeat("x", 2000)}
	_, _ = events.Create(long)
	_, _ = events.Update(long)
	for _, message := range []string{"short", "Xid 79", "‘x’ is wrong", ""} {
		_, _ = events.Create(&corev1.Event{Message: message})
	}
	got := kept.messages
	if len(got) != 6 || len(got[0]) != protocol.MaxText || got[1] != got[0] || long.Message[0] != 'x' || len(long.Message) != 2000 {
		t.Errorf("messages %q", got)
	}
	check.Equal(t, "short messages", []string{"Short", "Xid 79", "‘x’ is wrong", ""}, got[2:])
}
