package program

import (
	"strings"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// ShortEvents returns a sink that shortens the messages of Events, makes their first letters capitals, because many are texts of errors, and writes
// them to another sink.
func ShortEvents(sink record.EventSink) record.EventSink { return shortEvents{sink} }

// shortEvents passes patches on as they are: they count an Event that was written before.
type shortEvents struct{ record.EventSink }

// Create implements record.EventSink.
func (e shortEvents) Create(event *corev1.Event) (*corev1.Event, error) {
	return e.EventSink.Create(short(event))
}

// Update implements record.EventSink.
func (e shortEvents) Update(event *corev1.Event) (*corev1.Event, error) {
	return e.EventSink.Update(short(event))
}

func short(event *corev1.Event) *corev1.Event {
	out := *event
	_, size := utf8.DecodeRuneInString(event.Message)
	out.Message = protocol.Shorten(strings.ToUpper(event.Message[:size]) + event.Message[size:])
	return &out
}
