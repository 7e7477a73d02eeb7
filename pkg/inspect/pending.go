package inspect

import (
	"bytes"
	"io"

	"github.com/gpushare/gpushare/pkg/diagnosis"
)

// PendingOptions are the options of the table of pending pods.
type PendingOptions struct {
	// Wide adds kube-scheduler's message, unshortened.
	Wide bool
	// RowsOnly omits the header.
	RowsOnly bool
	Look     Look
}

// WritePending writes a row with the diagnosis of each pending pod. It writes nothing if there are none.
func WritePending(out io.Writer, report Report, options PendingOptions) error {
	if len(report.PendingPods) == 0 {
		return nil
	}
	header := []cell{{"NAMESPACE", bold}, {"NAME", bold}, {"REQUEST", bold}, {"CAUSE", bold}, {"WHY", bold}}
	if options.Wide {
		header = append(header, cell{"SCHEDULER", bold}, cell{"SCHEDULER SAYS", bold})
	}
	rows := [][]cell{header}
	for _, pod := range report.PendingPods {
		row := []cell{
			{text: pod.Namespace}, {text: pod.Name}, {text: pod.Request.String()},
			{string(pod.Cause), causeStyle(pod.Cause)}, {text: pod.Explanation},
		}
		if options.Wide {
			row = append(row, cells(pod.Scheduler, pod.Reason)...)
		}
		rows = append(rows, row)
	}
	if options.RowsOnly {
		rows = rows[1:]
	}
	var text bytes.Buffer
	writeRows(&text, options.Look, rows)
	_, err := text.WriteTo(out)
	return err
}

func causeStyle(cause diagnosis.Reason) style {
	switch cause {
	case diagnosis.TooLarge, diagnosis.Unhealthy, diagnosis.NoNode:
		return red // The pod stays pending even if other pods end.
	case diagnosis.Fits, diagnosis.Nominated:
		return green
	}
	return yellow
}
