package program

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
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
	_, _ = events.Create(&corev1.Event{Message: "short"})
	if got := kept.messages; len(got) != 3 || len(got[0]) != protocol.MaxText || got[1] != got[0] || got[2] != "short" || len(long.Message) != 2000 {
		t.Errorf("messages %q", got)
	}
}
