package main

import (
	"compress/gzip"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// source says where the public data comes from.
const source = "https://github.com/hkust-adsl/kubernetes-scheduler-simulator: data/csv/openb_node_list_gpu_node.csv, openb_node_list_all_node.csv and openb_pod_list_*.csv " +
	"(from https://github.com/alibaba/clusterdata, cluster-trace-gpu-v2023), and experiments/analysis/expected_results/analysis_allo_discrete.csv as allo.csv"

// cardMemory is the memory of every card of the trace, which counts thousandths of a card.
const cardMemory = 1000

// traceNode is a node of the trace.
type traceNode struct {
	name, model string
	cards       int
	// cpu is in thousandths, memory in MiB.
	cpu, memory int64
}

// tracePod is a pod of the trace.
type tracePod struct {
	name string
	// cpu is in thousandths, memory in MiB.
	cpu, memory int64
	// cards is the number of cards, zero for a pod without GPU; milli is what the pod asks for of each.
	cards, milli int
	// models are the models of cards that the pod accepts, separated by "|"; empty for all.
	models string
}

// gpu returns what the pod asks for of all cards, in thousandths of a card.
func (p *tracePod) gpu() int { return p.cards * p.milli }

// readNodes returns the nodes with cards, or all nodes.
func readNodes(dir string, all bool) (nodes []traceNode, err error) {
	name := "openb_node_list_gpu_node.csv"
	if all {
		name = "openb_node_list_all_node.csv"
	}
	rows, err := readTable(dir, name)
	for _, row := range rows {
		nodes = append(nodes, traceNode{
			name: row.text("sn"), model: row.text("model"), cards: int(row.number("gpu")),
			cpu: row.number("cpu_milli"), memory: row.number("memory_mib"),
		})
	}
	slices.SortFunc(nodes, func(a, b traceNode) int { return strings.Compare(a.name, b.name) })
	return nodes, errors.Join(err, firstError(rows))
}

func readPods(dir, workload string) (pods []tracePod, err error) {
	rows, err := readTable(dir, workload+".csv")
	for _, row := range rows {
		pod := tracePod{
			name: row.text("name"), cpu: row.number("cpu_milli"), memory: row.number("memory_mib"),
			cards: int(row.number("num_gpu")), milli: int(row.number("gpu_milli")), models: row.text("gpu_spec"),
		}
		pods = append(pods, pod)
	}
	slices.SortFunc(pods, func(a, b tracePod) int { return strings.Compare(a.name, b.name) })
	return pods, errors.Join(err, firstError(rows))
}

// readWorkloads returns the names of the lists of pods in the directory.
func readWorkloads(dir string) (workloads []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, podList+"*.csv*"))
	for _, path := range paths {
		name := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(path), ".gz"), ".csv")
		workloads = append(workloads, name)
	}
	slices.Sort(workloads)
	return slices.Compact(workloads), err
}

// podList is how the names of all lists of pods begin.
const podList = "openb_pod_list_"

// publishedKey names a run of the published experiments.
type publishedKey struct {
	workload string
	seed     int64
}

// readPublished returns what FGD allocates of the GPUs, in percent, when pods worth at percent of them have arrived.
func readPublished(dir string, at int) (map[publishedKey]float64, error) {
	rows, err := readTable(dir, "allo.csv")
	published := map[publishedKey]float64{}
	for _, row := range rows {
		if strings.HasSuffix(row.text("sc_policy"), "FGD") {
			published[publishedKey{row.text("workload"), row.number("seed")}] = row.decimal(strconv.Itoa(at))
		}
	}
	return published, errors.Join(err, firstError(rows))
}

// row is a row of a table.
type row struct {
	columns map[string]int
	values  []string
	err     error
}

// text returns a value, empty if the table lacks the column.
func (r *row) text(column string) string {
	i, found := r.columns[column]
	if !found {
		return ""
	}
	return r.values[i]
}

// number returns a value as a number, zero if it is empty.
func (r *row) number(column string) int64 { return int64(r.decimal(column)) }

func (r *row) decimal(column string) float64 {
	text := r.text(column)
	if text == "" {
		return 0
	}
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		r.err = fmt.Errorf("column %s: %w", column, err)
	}
	return value
}

func firstError(rows []*row) error {
	for _, r := range rows {
		if r.err != nil {
			return r.err
		}
	}
	return nil
}

// readTable reads a file, or the file of this name that is compressed.
func readTable(dir, name string) (rows []*row, err error) {
	file, err := open(filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	columns := map[string]int{}
	for i, line := range lines {
		if i > 0 {
			rows = append(rows, &row{columns: columns, values: line})
			continue
		}
		for position, column := range line {
			columns[column] = position
		}
	}
	return rows, nil
}

func open(path string) (io.ReadCloser, error) {
	file, err := os.Open(path)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return file, err
	}
	if file, err = os.Open(path + ".gz"); err != nil {
		return nil, err
	}
	return gzip.NewReader(file) // The process ends before it has many open files.
}
