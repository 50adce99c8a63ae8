from benchmarks.serialization import main

if __name__ == "__main__":
    main()
