package inspect

import (
	"bytes"
	"io"

	"github.com/gpushare/gpushare/pkg/waiting"
)

// PendingOptions say how much the table of pending pods shows.
type PendingOptions struct {
	// Wide adds what kube-scheduler itself says, in full.
	Wide bool
	// RowsOnly leaves the header out.
	RowsOnly bool
	Look     Look
}

// WritePending writes one row for each pod that waits, with the reason in words. Nothing is written where none waits.
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

func causeStyle(cause waiting.Cause) style {
	switch cause {
	case waiting.TooLarge, waiting.Unhealthy, waiting.NoNode:
		return red // No pod's end helps.
	case waiting.Fits, waiting.Nominated:
		return green
	}
	return yellow
}
