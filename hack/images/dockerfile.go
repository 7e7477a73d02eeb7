package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
)

// stage is the last stage of a Dockerfile: the properties of the image except its files.
type stage struct {
	user       string
	entrypoint []string
	labels     map[string]string
}

// parse parses the last stage of a Dockerfile. Its files must be those of rootfs.sh: the archives have no others.
func parse(dockerfile string, args map[string]string) (stage, error) {
	out := stage{labels: map[string]string{}}
	values := map[string]string{}
	copied := false
	for _, line := range lastStage(dockerfile) {
		instruction, rest, _ := strings.Cut(line, " ")
		rest = strings.TrimSpace(rest)
		switch {
		case line == "FROM scratch":
		case line == "COPY --from=build /rootfs /":
			copied = true
		case instruction == "ARG":
			for word := range strings.FieldsSeq(rest) {
				name, value, _ := strings.Cut(word, "=")
				if given, ok := args[name]; ok {
					value = given
				}
				values[name] = value
			}
		case instruction == "LABEL":
			for word := range strings.FieldsSeq(rest) {
				name, value, ok := strings.Cut(word, "=")
				if !ok {
					return stage{}, fmt.Errorf("%q: a label without a value", line)
				}
				out.labels[name] = os.Expand(value, func(name string) string { return values[name] })
			}
		case instruction == "USER":
			out.user = rest
		case instruction == "ENTRYPOINT":
			if err := json.Unmarshal([]byte(rest), &out.entrypoint); err != nil {
				return stage{}, fmt.Errorf("%q: %w", line, err)
			}
		default:
			return stage{}, fmt.Errorf("%q: not allowed in the last stage", line)
		}
	}
	switch {
	case !copied:
		return stage{}, errors.New("the last stage doesn't copy /rootfs from the build stage")
	case len(out.entrypoint) == 0:
		return stage{}, errors.New("the last stage has no ENTRYPOINT")
	}
	for name := range args {
		if _, found := values[name]; !found {
			return stage{}, fmt.Errorf("the last stage has no ARG %s", name)
		}
	}
	return out, nil
}

// lastStage returns the instructions of the last stage, each on one line.
func lastStage(dockerfile string) (lines []string) {
	for line := range strings.SplitSeq(strings.ReplaceAll(dockerfile, "\\\n", " "), "\n") {
		line = strings.Join(strings.Fields(line), " ")
		if strings.HasPrefix(line, "FROM ") {
			lines = nil
		}
		if line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}
