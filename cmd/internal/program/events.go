package program

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// ShortEvents returns a sink that shortens the messages of Events and writes them to another sink.
func ShortEvents(sink record.EventSink) record.EventSink { return shortEvents{sink} }

type shortEvents struct{ to record.EventSink }

// Create implements record.EventSink.
func (e shortEvents) Create(event *corev1.Event) (*corev1.Event, error) {
	return e.to.Create(short(event))
}

// Update implements record.EventSink.
func (e shortEvents) Update(event *corev1.Event) (*corev1.Event, error) {
	return e.to.Update(short(event))
}

// Patch implements record.EventSink. It counts an Event that was written before.
func (e shortEvents) Patch(event *corev1.Event, data []byte) (*corev1.Event, error) {
	return e.to.Patch(event, data)
}

func short(event *corev1.Event) *corev1.Event {
	if len(event.Message) <= protocol.MaxText {
		return event
	}
	event = event.DeepCopy()
	event.Message = protocol.Shorten(event.Message)
	return event
}
