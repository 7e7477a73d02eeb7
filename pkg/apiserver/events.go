package apiserver

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// ShortEvents returns a recorder that shortens the messages of Events: the API server rejects long ones.
func ShortEvents(recorder record.EventRecorder) record.EventRecorder { return shortEvents{recorder} }

type shortEvents struct{ to record.EventRecorder }

// Event implements record.EventRecorder.
func (e shortEvents) Event(object runtime.Object, kind, reason, message string) {
	e.to.Event(object, kind, reason, protocol.Shorten(message))
}

// Eventf implements record.EventRecorder.
func (e shortEvents) Eventf(object runtime.Object, kind, reason, format string, args ...any) {
	e.Event(object, kind, reason, fmt.Sprintf(format, args...))
}

// AnnotatedEventf implements record.EventRecorder.
func (e shortEvents) AnnotatedEventf(object runtime.Object, annotations map[string]string, kind, reason, format string, args ...any) {
	e.to.AnnotatedEventf(object, annotations, kind, reason, "%s", protocol.Shorten(fmt.Sprintf(format, args...)))
}
